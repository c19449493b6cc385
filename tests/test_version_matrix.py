"""`make matrix`, the weekly workflow and the documentation name the same pairs of versions, and tests that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import version_matrix as matrix
from packaging.requirements import Requirement

from tfdist.versions import oldest_supported, tested_ranges

ROOT = Path(__file__).resolve().parents[1]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_workflow_and_the_documentation_have_every_pair() -> None:
    workflow = read(".github/workflows/versions.yml")
    assert re.findall(r'"([\w.-]+)"', workflow.partition("pair: [")[2].partition("]")[0]) == list(matrix.PAIRS)
    assert "cron:" in workflow and "make matrix PAIRS=" in workflow
    rows = re.findall(r"^\| `([\w.-]+)` \|", read("docs/versions.md"), re.MULTILINE)
    assert set(rows) == set(matrix.PAIRS)


def test_the_pairs_contain_the_oldest_supported_versions() -> None:
    stated = {Requirement(need.removesuffix(".*")) for pair in matrix.PAIRS.values() for need in pair if "==" in need}
    versions = {name: {str(need.specifier)[2:] for need in stated if need.name == name} for name in ("keras",)}
    versions["tensorflow"] = {str(need.specifier)[2:] for need in stated if need.name == "tensorflow-cpu"}
    for name, found in versions.items():
        assert found <= set(filter(tested_ranges()[name].contains, found))
        assert f">={min(found, key=lambda version: int(version.split('.')[1]))}" == str(oldest_supported(name))


def test_the_tests_exist() -> None:
    for test in (*matrix.TESTS, *matrix.ABSENT_BEFORE):
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file() and f"def {name}" in read(path)


def test_a_version_of_keras_deselects_what_it_cannot() -> None:
    assert matrix.selection("3.16.0.dev2026102704") == list(matrix.TESTS)
    assert matrix.selection("3.13.2")[len(matrix.TESTS) :: 2] == ["--deselect"] * len(matrix.ABSENT_BEFORE)


def test_an_unknown_pair_is_an_error() -> None:
    script = ROOT / "tests" / "support" / "version_matrix.py"
    finished = subprocess.run([sys.executable, script, "0.1-0.2"], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert "Received: 0.1-0.2. Expected: some of 2.18-3.10," in finished.stderr


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1)])
def test_a_pair_that_fails_fails_all(codes, expected, monkeypatch, capsys) -> None:
    left = iter(codes)

    def run_pair(pair: str, processes: int) -> matrix.PairResult:
        code = next(left)
        return matrix.PairResult(pair, {"tensorflow": "2", "keras": "3"}, f"{code} failed", code == 0, 1.0)

    monkeypatch.setattr(matrix, "run_pair", run_pair)
    monkeypatch.setattr(sys, "argv", ["version_matrix.py", "newest", "nightly"])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert int(ended.value.code) == expected
    assert f"| `nightly` | 2 | 3 | {codes[1]} failed |" in capsys.readouterr().out
