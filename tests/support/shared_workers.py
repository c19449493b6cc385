"""Runs of two workers that are shared by several programs: their processes take longer to start than most of these.

The workers' program is this file: `python shared_workers.py FOLDER RUN PROGRAM...`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from launched_runs import LaunchedRun, launch_once

_TESTS = Path(__file__).resolve().parents[1]
# By run: its programs in order, which are modules beside their tests, and arguments of their `main` after a folder.
_RUNS: dict[str, dict[str, tuple[str, list[str]]]] = {
    "one device each": {
        "on_workers_dtypes": ("strategies/test_dtypes_on_workers.py", ["MODELS"]),
        "on_workers_local": ("local_updates/test_local_updates_on_workers.py", ["1"]),
        "on_workers_sharded": ("sharded_state/test_sharded_on_workers.py", ["1", "1"]),
    },
    "one device and two": {
        "on_workers_unequal": ("strategies/test_unequal_workers.py", []),
        "on_workers_shares": ("load_balancing/test_shares_on_workers.py", ["PROGRAMS"]),
    },
}


def run_of_program(request: Any, program: str) -> LaunchedRun:
    """Returns the part of a program in its run, which is started once in a test session.

    Args:
      request: the fixture. A run has the programs of all selected tests.
      program: a module of the table.
    """
    (name, programs), *_ = [item for item in _RUNS.items() if program in item[1]]
    selected = {test.path for test in request.session.items}
    chosen = [one for one, (tests, _) in programs.items() if _TESTS / tests in selected]
    paths = {(_TESTS / tests).parent: None for tests, _ in programs.values()}
    factory = request.getfixturevalue("tmp_path_factory")
    run = launch_once(factory, name, Path(__file__), name, *chosen, options=["--workers", "2"], paths=[*paths])
    return LaunchedRun(run.folder / program, run.folder)


def main(folder: Path, run: str, *programs: str) -> None:
    """Runs programs one after another, each with a folder of its own."""
    for program in programs:
        own = folder / program
        own.mkdir(exist_ok=True)
        importlib.import_module(program).main(own, *_RUNS[run][program][1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
