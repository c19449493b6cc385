"""What tests of engines share: an environment of their own, the run to compare with, and what is left."""

import contextlib
import os
import time
from pathlib import Path

import pytest
from child_environment import child_environment
from launched_runs import launch

HERE = Path(__file__).parent


@contextlib.contextmanager
def engine_environment(temporary, *paths, **variables):
    """Gives this process, and those that an engine starts, the environment of a test and its temporary directory."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(child_environment()):
            patch.delenv(name)
        for name, value in child_environment(HERE, *paths, TMPDIR=str(temporary), **variables).items():
            patch.setenv(name, value)
        patch.setattr("tempfile.tempdir", None)
        yield


OPTIONS = ("--workers", "2", "--threads-per-worker", "1", "--network", "host")
SCRIPT = HERE / "engine_functions.py"


def weights_of_run(folder, name, *more, arguments=()):
    """The weights of `tfdist run` of `engine_functions.py`."""
    run = launch(folder, SCRIPT, *arguments, options=(*OPTIONS, *more)).assert_complete()
    return list(run.arrays(name).values())


def assert_identical(weights, reference):
    assert [weight.tobytes() for weight in weights] == [weight.tobytes() for weight in reference]


def eventually(condition, what, seconds=60):
    """Waits for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.05)


def launched_processes(directory):
    """The launchers and workers of places whose temporary files are in a directory."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(f"{directory}/tfdist-place-" in part for part in process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return found
