"""The kit of `make gpu`: without a GPU one line, on CPUs the same cases, and a page that has what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from child_environment import child_environment

_ROOT = Path(__file__).resolve().parents[2]
_KIT = _ROOT / "benchmarks" / "gpu.py"
_RESULTS = _ROOT / "benchmarks" / "results" / "gpu.json"
_LIMIT_SECONDS = 1200
_LONG_SECONDS = 3600
_FEW = ("sharded_state_replicas", "speed_codecs")


def _run(*arguments, limit_seconds=_LIMIT_SECONDS, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=_ROOT,
        env={**child_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )


def test_without_a_gpu_one_line_is_printed_and_tensorflow_is_not_imported(tmp_path):
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['gpu.py', '--out', {str(tmp_path / 'gpu.json')!r}]\n"
        "try:\n"
        f"    runpy.run_path({str(_KIT)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print(end.code, sorted({'tensorflow', 'keras'} & set(sys.modules)))\n"
    )
    finished = _run("-c", program, CUDA_VISIBLE_DEVICES="-1")
    assert finished.returncode == 0, finished.stderr
    said, end = finished.stdout.splitlines()
    assert said.endswith("nothing was run.")
    assert end == "0 []"
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("suite_workers", ["suite_workers"]),
        ("suite_workers*", ["suite_workers", "suite_workers_x2"]),
        ("recovery,nccl_*", ["recovery", "nccl_one_worker", "nccl_two_workers"]),
    ],
)
def test_cases_are_chosen_by_name_or_by_a_beginning_and_a_star(chosen, expected):
    assert _run(str(_KIT), "--list", f"--cases={chosen}").stdout.split() == expected


def test_an_unknown_case_is_an_error_that_lists_the_cases():
    finished = _run(str(_KIT), "--cases=suite")
    assert finished.returncode == 2
    assert "no case is named suite. There are reference," in finished.stderr


def _assert_rows_are_complete(cases):
    for name, row in cases.items():
        assert isinstance(row["ok"], bool), name
        assert row["seconds"] >= 0, name
        if not row["ok"]:
            assert row["error"], name
        elif name.startswith("compression_"):
            assert {"loss", "loss_on_cpu", "workers_equal", "difference"} <= row.keys(), name
        elif name == "speed_codecs":
            assert {"codecs", "copies", "gigabytes"} <= row.keys(), name
        elif name.startswith("speed_"):
            assert {"ms", "ratios", "parameters"} <= row.keys(), name
        elif name == "doctor":
            assert row["said"]
        elif not name.startswith("reference"):
            assert "note" in row or "difference" in row, name
            assert "note" in row or name == "recovery" or row["difference"] <= row["allowed"], name


@pytest.mark.long
def test_a_few_cases_run_on_cpus(tmp_path):
    file = tmp_path / "gpu.json"
    finished = _run(str(_KIT), "--devices=cpu", "--small", f"--cases={','.join(_FEW)}", f"--out={file}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads(file.read_text())
    assert set(results["cases"]) == {"reference", "reference_cpu", *_FEW}
    assert {"date", "cores", "gpus", "versions", "torch"} <= results["machine"].keys()
    _assert_rows_are_complete(results["cases"])
    assert all(row["ok"] for row in results["cases"].values())


@pytest.mark.long
def test_all_cases_run_on_cpus(tmp_path):
    file = tmp_path / "gpu.json"
    arguments = ["--devices=cpu", "--small", "--parallel=1", "--limit=300", f"--out={file}"]
    finished = _run(str(_KIT), *arguments, limit_seconds=_LONG_SECONDS)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    cases = json.loads(file.read_text())["cases"]
    assert list(cases) and set(cases) == set(_run(str(_KIT), "--list").stdout.split())
    _assert_rows_are_complete(cases)


def test_a_case_that_fails_is_a_row_with_its_error(tmp_path):
    file = tmp_path / "gpu.json"
    finished = _run(str(_KIT), "--devices=cpu", "--small", "--cases=compression_int8", "--limit=0.1", f"--out={file}")
    assert finished.returncode == 1
    row = json.loads(file.read_text())["cases"]["compression_int8"]
    assert not row["ok"]
    assert "still running after 0.1 s" in row["error"]


def test_the_page_has_the_tables_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(_KIT.parent))
    from gpu_run import result_tables

    text = result_tables.PAGE.read_text(encoding="utf-8")
    results = result_tables.read(_RESULTS)
    assert text == result_tables.filled(results, text), "Run `python benchmarks/gpu.py --table`."
    for name, part in result_tables.tables(results).items():
        assert part in text, name
    _assert_rows_are_complete(results["cases"])
