"""The processes that tests start: their environment, and Python that runs to its end."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent

# What describes a cluster or a task, or limits threads, as in a worker or a job of a scheduler.
FOREIGN = ("TF_CONFIG", "TF_NUM_", "OMP_NUM_THREADS", "TFDIST_", "SLURM_", "JOB_COMPLETION_INDEX")


def child_environment(*paths: str | Path, **variables: str) -> dict[str, str]:
    """Returns this process's environment, without a cluster or a task, for a process that may import TensorFlow.

    Such a process, and those that it starts, import the checkout, `testing`, and the modules of `tests/support`, among
    them `sitecustomize`, which makes the import of Keras cheaper.

    Args:
        *paths: further directories of PYTHONPATH.
        **variables: variables to set.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    path = os.pathsep.join(map(str, (ROOT, SUPPORT, TESTS, *paths)))
    return {**kept, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **variables}


def run_python(
    *arguments: str | Path,
    paths: tuple[str | Path, ...] = (),
    cwd: Path = ROOT,
    limit_seconds: float = 900,
    exit_code: int | None = 0,
    **variables: str,
) -> "subprocess.CompletedProcess[str]":
    """Runs `python *arguments` in a `child_environment` and returns what it has printed.

    Args:
        *arguments: arguments of Python.
        paths: further directories of PYTHONPATH.
        cwd: working directory.
        limit_seconds: from which on the process is killed, and the test fails.
        exit_code: another one fails the test; None: any is right.
        **variables: variables of the environment.
    """
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=child_environment(*paths, **variables),
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    assert exit_code in (None, ended.returncode), f"{ended.stdout[-4000:]}\n{ended.stderr[-6000:]}"
    return ended
