"""Runs programs in new processes, each with a time limit, and keeps what they printed."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOREIGN = ("TF_CONFIG", "TFDIST_", "SLURM_", "OMP_NUM_THREADS", "TF_NUM_")
_LAST_CHARACTERS = 1500
_MARKS = ("Error", "error:", "failed", "Aborted", "Duplicate GPU", "FAILED")
# Exact float32 in the libraries of CUDA, also in processes that run TensorFlow's server and not the program; and
# kernels whose results do not depend on the order of threads.
_EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "TF_DETERMINISTIC_OPS": "1"}
# Memory for several processes on one card.
_ALWAYS = {
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class CaseError(Exception):
    """A case has failed; the message says why."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    output: str
    errors: str
    seconds: float

    def last_lines(self) -> str:
        """Returns the lines that say what is wrong, and the last ones."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        marked = [line for line in lines if any(mark in line for mark in _MARKS)]
        kept = list(dict.fromkeys([*marked[-4:], *lines[-3:]]))
        return " | ".join(line[:400] for line in kept)[-_LAST_CHARACTERS:]


def environment(*, uses_gpu: bool, is_exact: bool = True, **variables: str) -> dict[str, str]:
    """Returns the environment of a program.

    Args:
        uses_gpu: Whether it sees the GPUs.
        is_exact: Whether float32 is exact and kernels are deterministic, where the speed is not of interest.
        variables: Further ones, which replace others.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    hidden = {} if uses_gpu else {"CUDA_VISIBLE_DEVICES": "-1"}
    return {**kept, **_ALWAYS, **(_EXACT if is_exact else {}), **hidden, **variables}


def finish(
    command: Sequence[str], environ: Mapping[str, str], *, limit_seconds: float, may_fail: bool = False
) -> Finished:
    """Runs a command until it ends, and ends its process group after `limit_seconds`.

    Raises:
        CaseError: It took too long, or, unless it `may_fail`, it ended with another code than 0.
    """
    began = time.monotonic()
    # Files and not pipes: processes that the command has left behind may hold a pipe open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command,
            env=dict(environ),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            is_late = child.poll() is None
            _end(child)
        seconds = time.monotonic() - began
        output.seek(0)
        errors.seek(0)
        finished = Finished(child.returncode, output.read(), errors.read(), seconds)
    if is_late:
        raise CaseError(f"still running after {limit_seconds:g} s: {finished.last_lines()}")
    if finished.code and not may_fail:
        raise CaseError(f"exit code {finished.code}: {finished.last_lines()}")
    return finished


def _end(child: subprocess.Popen) -> None:
    """Ends the process group; workers of `tfdist run` die with their launcher."""
    for number, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(seconds)
            return
