"""The environment of the processes that tests start."""

import os
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
