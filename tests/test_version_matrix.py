"""`make matrix`, the weekly workflow and the documentation name the same pairs of versions, and tests that exist."""

import doctest
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cluster_cases
import pytest
import version_matrix as matrix
import version_tests
from packaging.requirements import Requirement
from version_tests import ABSENT_BEFORE, GROUPS, selection

from tfdist.versions import oldest_supported, tested_ranges

ROOT = Path(__file__).resolve().parents[1]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_workflow_has_every_pair() -> None:
    workflow = read(".github/workflows/versions.yml")
    assert re.findall(r'"([\w.-]+)"', workflow.partition("pair: [")[2].partition("]")[0]) == list(matrix.PAIRS)
    assert "cron:" in workflow and "make matrix PAIRS=" in workflow


def test_the_documentation_has_a_result_of_every_pair_and_group() -> None:
    head, line = matrix.table([]).splitlines()
    rows = read("docs/versions.md").partition(f"{head}\n{line}\n")[2].partition("\n\n")[0].splitlines()
    versions = r"(\d+\.\d+\.\S+) \| (\d+\.\d+\.\S+) \| (3\.1[123]\.\d+)"
    outcome = r"(?:\d+ passed(?:, \d+ failed)?(?:, \d+ skipped)?|not run)"
    form = re.compile(rf"\| `([\w.-]+)` \| {versions}(?: \| {outcome}){{{len(GROUPS)}}} \|")
    found = [form.fullmatch(row) for row in rows]
    assert all(found), rows
    assert {row[1] for row in found if row} == set(matrix.PAIRS)


def test_the_pairs_contain_the_oldest_supported_versions() -> None:
    stated = {Requirement(need.removesuffix(".*")) for pair in matrix.PAIRS.values() for need in pair if "==" in need}
    versions = {name: {str(need.specifier)[2:] for need in stated if need.name == name} for name in ("keras",)}
    versions["tensorflow"] = {str(need.specifier)[2:] for need in stated if need.name == "tensorflow-cpu"}
    for name, found in versions.items():
        assert found <= set(filter(tested_ranges()[name].contains, found))
        assert f">={min(found, key=lambda version: int(version.split('.')[1]))}" == str(oldest_supported(name))


@pytest.mark.parametrize("module", [matrix, version_tests], ids=lambda module: module.__name__)
def test_examples_of(module) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_the_tests_exist() -> None:
    for test in (*ABSENT_BEFORE, *(test for tests in GROUPS.values() for test in tests)):
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file() and f"def {name.partition('[')[0]}" in read(path)


def test_a_version_of_keras_deselects_what_it_cannot() -> None:
    tests = [test for tests in GROUPS.values() for test in tests]
    assert selection("3.16.0.dev2026102704") == tests
    assert selection("3.13.2")[len(tests) :: 2] == ["--deselect"] * len(ABSENT_BEFORE)


def test_outcomes_are_counted_by_group(tmp_path) -> None:
    parity, cluster = "tests.parity.test_parity", "tests.parameter_server.test_cluster_training"
    name = "test_replicas_equal_one_process"
    cases = [
        f'<testcase classname="{parity}" name="{name}[2 local replicas-masked_sequences]"/>',
        f'<testcase classname="{parity}" name="{name}[2 workers x 1-masked_sequences]"><failure/></testcase>',
        f'<testcase classname="{cluster}" name="test_equal_to_one_process[custom_train_step]"><error/></testcase>',
        '<testcase classname="tests.strategies.test_compressed_training" name="test_bytes[2]"/>',
        '<testcase classname="tests.strategies.test_compressed_training" name="test_bytes[3]"/>',
        '<testcase classname="tests.recovery.test_callback_state" name="test_more"><skipped/></testcase>',
    ]
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert matrix.outcomes_in(tmp_path / "report.xml") == {
        "one process": {"passed": 1},
        "workers": {"failed": 1},
        "parameter servers": {"failed": 1},
        "compression": {"passed": 2},
        "recovery": {"skipped": 1},
    }


def test_a_cluster_runs_the_cases_that_the_selected_tests_name() -> None:
    def uses_a_constant(found):
        return found("mixed_float16")

    def test(function, fixtures, **parameters):
        return SimpleNamespace(function=function, fixturenames=fixtures, callspec=SimpleNamespace(params=parameters))

    def nothing():
        pass

    of_the_cluster = ["cluster", "found"]
    tests = [
        test(uses_a_constant, of_the_cluster),
        test(nothing, of_the_cluster, name="momentum_2", other=[1]),
        test(nothing, [*of_the_cluster, "transferred_bytes"]),
        test(nothing, ["tmp_path"], name="own_loop"),
        object(),
    ]
    assert cluster_cases.cases_of(tests) == ["momentum_2", "mixed_float16", "transferred_bytes"]
    assert "own_loop" in cluster_cases.cases_of([test(nothing, of_the_cluster)]), "none is named, so all may be used"


def test_an_unknown_pair_is_an_error() -> None:
    script = ROOT / "tests" / "support" / "version_matrix.py"
    finished = subprocess.run([sys.executable, script, "0.1-0.2"], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2
    assert "Received: 0.1-0.2. Expected: some of 2.18-3.10," in finished.stderr


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1)])
def test_a_pair_that_fails_fails_all(codes, expected, monkeypatch, capsys) -> None:
    left = iter(codes)

    def run_pair(pair: str, processes: int, groups: list[str]) -> matrix.PairResult:
        code = next(left)
        versions = {"TensorFlow": "2", "Keras": "3", "Python": "3.11"}
        return matrix.PairResult(pair, versions, {"canaries": {"failed": code}}, code == 0)

    monkeypatch.setattr(matrix, "run_pair", run_pair)
    monkeypatch.setattr(sys, "argv", ["version_matrix.py", "newest", "nightly"])
    with pytest.raises(SystemExit) as ended:
        matrix.main()
    assert int(ended.value.code) == expected
    assert f"| `nightly` | 2 | 3 | 3.11 | {codes[1]} failed |" in capsys.readouterr().out
