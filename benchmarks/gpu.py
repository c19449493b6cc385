"""Runs tfdist on the GPUs of this machine, case by case, and writes what it finds to a file.

    make gpu
    python benchmarks/gpu.py --cases parity_workers,compression_* --out gpu.json --torch-python .../bin/python
    python benchmarks/gpu.py --devices cpu --parallel 1          the same cases, on logical CPUs
    python benchmarks/gpu.py --table                             writes the results into docs/gpu.md

Each case runs in new processes with a time limit. The file is written after every case; a case that fails is a
row with its error. Without a GPU nothing is run.
"""

import argparse
import concurrent.futures
import fnmatch
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_run import result_tables
from gpu_run.cases import CASES, EXACT_REFERENCES, REFERENCE_CASES, Case, Machine
from gpu_run.gpu_machine import describe, visible_gpus
from gpu_run.limited_processes import CaseError
from gpu_run.speed_cases import SPEED_CASES

_RESULTS = Path(__file__).parent / "results" / "gpu.json"
_ALL = {case.name: case for case in (*REFERENCE_CASES, *CASES, *SPEED_CASES)}


def main() -> int:
    """Runs the cases, prints a line for each, and returns the number of those that failed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="names, or a beginning and *, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="file of the results")
    parser.add_argument("--devices", choices=("gpu", "cpu"), default="gpu", help="cpu: logical CPUs in place of GPUs")
    parser.add_argument("--torch-python", help="an interpreter with PyTorch, for the cases beside it")
    parser.add_argument("--parallel", type=int, help="cases at a time (default: one for each three cores)")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds of a process")
    parser.add_argument("--small", action="store_true", help="small models in the speed cases: tries the path only")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other cases in the file")
    parser.add_argument("--table", action="store_true", help="write the file into the tables of docs/gpu.md")
    parser.add_argument("--list", action="store_true", help="print the names of the chosen cases")
    options = parser.parse_args()
    chosen = _chosen(parser, options.cases)
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if options.table:
        result_tables.write(result_tables.read(options.out))
        return 0
    gpus = visible_gpus()
    if options.devices == "gpu" and not gpus:
        print("make gpu: this machine has no NVIDIA GPU, or CUDA_VISIBLE_DEVICES hides it; nothing was run.")
        return 0
    parallel = options.parallel or max(len(os.sched_getaffinity(0)) // 3, 1)
    with tempfile.TemporaryDirectory(prefix="tfdist-gpu-") as folder:
        kind, torch_python = options.devices.upper(), options.torch_python
        references = tuple(dict.fromkeys(name for case in chosen for name in _trained_by(case)))
        machine = Machine(kind, gpus, options.limit, Path(folder), torch_python, references, options.small)
        report = _Report(options.out, describe(torch_python), options.keep)
        timed = [case for case in chosen if case in SPEED_CASES]
        others = [case for case in chosen if case in CASES]
        needed = REFERENCE_CASES if references else ()
        # The others are compared with the first ones; what is timed has the machine for itself.
        for together, at_once in ((needed, parallel), (others, parallel), (timed, 1)):
            with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
                list(pool.map(lambda case: report.add(case, machine), together))
    return report.finish()


def _trained_by(case: Case) -> tuple[str, ...]:
    return tuple(filter(None, (case.reference, EXACT_REFERENCES.get(case.reference))))


def _chosen(parser: argparse.ArgumentParser, names: str) -> list[Case]:
    patterns = [name for name in names.split(",") if name]
    unknown = [pattern for pattern in patterns if not fnmatch.filter(_ALL, pattern)]
    if unknown:
        parser.error(f"--cases: no case is named {', '.join(unknown)}. There are {', '.join(_ALL)}.")
    selected = {name for pattern in patterns or ["*"] for name in fnmatch.filter(_ALL, pattern)}
    return [case for name, case in _ALL.items() if name in selected]


class _Report:
    """The rows so far, in a file."""

    def __init__(self, file: Path, machine: dict[str, Any], keeps_others: bool) -> None:
        self._file, self._machine = file, machine
        self._rows: dict[str, dict[str, Any]] = {}
        if keeps_others and file.exists():
            self._rows = json.loads(file.read_text())["cases"]
        self._lock, self._began = threading.Lock(), time.monotonic()
        self._write()

    def add(self, case: Case, machine: Machine) -> None:
        """Runs a case, prints its line and writes the file."""
        began = time.monotonic()
        try:
            row = case.run(machine)
        except CaseError as error:
            row = {"ok": False, "error": str(error)}
        except Exception:
            row = {"ok": False, "error": traceback.format_exc()[-1500:]}
        row["seconds"] = round(time.monotonic() - began, 1)
        with self._lock:
            self._rows[case.name] = row
            self._write()
            elapsed = time.monotonic() - self._began
            state = "ok  " if row["ok"] else "FAIL"
            print(f"{elapsed:6.1f} s  {state}  {case.name} ({row['seconds']} s): {_shown(row)}", flush=True)

    def finish(self) -> int:
        """Prints a last line, and returns the exit code."""
        failed = [name for name, row in self._rows.items() if not row["ok"]]
        elapsed = time.monotonic() - self._began
        print(
            f"{len(self._rows) - len(failed)} of {len(self._rows)} cases are as expected, {elapsed:.0f} s", flush=True
        )
        print(f"written: {self._file}", flush=True)
        return 1 if failed else 0

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".tmp")
        new.write_text(json.dumps({"machine": self._machine, "cases": self._rows}, indent=1) + "\n")
        new.replace(self._file)


def _shown(row: dict[str, Any]) -> str:
    parts = [f"{name} {_value(value)}" for name, value in row.items() if name not in ("ok", "differences", "seconds")]
    return ", ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(one)}" for name, one in value.items()) + "}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
