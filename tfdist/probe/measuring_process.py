"""A child process that measures: pinned to cores, ended with its parent, with a pipe for its messages."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tfdist
from tfdist.utils.formatting import signal_name
from tfdist.utils.linux_syscalls import die_with_parent

_CHUNK_BYTES = 1 << 16
_STDERR = 2
# Those by which `tfdist.cluster.detect` finds a cluster, also Slurm's and Kubernetes', and those of `tfdist run`.
_CLUSTER_VARIABLES = frozenset(
    "TF_CONFIG SLURM_STEP_ID TFDIST_NUM_WORKERS TFDIST_SERVICE TFDIST_RUN_ID TFDIST_ATTEMPT TFDIST_FULL_WORKERS".split()
)
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child that is in no cluster, finds this tfdist, and writes no compiled modules."""
    kept = {name: value for name, value in environ.items() if name not in _CLUSTER_VARIABLES}
    path = os.pathsep.join([str(Path(tfdist.__file__).parents[1]), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {_LOG_LEVEL: "2", **kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class MeasuringProcess:
    """Runs a module of tfdist as a program, whose first argument is the descriptor of a pipe to this process.

    Its output goes to the standard error of this process. It leads a process group, which is killed when the `with`
    block ends, and when this process dies.

    Attributes:
        timed_out: Whether `messages` has ended because of its limit.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], *, cores: Sequence[int]
    ) -> None:
        """Starts the process.

        Args:
            module: The module.
            arguments: The arguments after the descriptor.
            environ: The environment.
            cores: The numbers of its cores among the usable ones.
        """
        self.timed_out = False
        self._read, write = os.pipe()
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(parent)
            if hasattr(os, "sched_setaffinity"):
                usable = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {usable[number] for number in cores if number < len(usable)} or set(usable))

        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(write), *arguments],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                start_new_session=True,
                pass_fds=(write,),
                preexec_fn=prepare,
            )
        except BaseException:
            os.close(self._read)
            raise
        finally:
            os.close(write)

    def messages(self, timeout_seconds: float) -> Iterator[Any]:
        """Yields the JSON values of the lines that the process sends, until it ends or the time is over."""
        end = time.monotonic() + timeout_seconds
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                if not selector.select(left):
                    break
                data = os.read(self._read, _CHUNK_BYTES)
                received += data
                *lines, received = received.split(b"\n")
                if not data:
                    lines.append(received)
                yield from (json.loads(line) for line in lines if line.strip())
                if not data:
                    return
        self.timed_out = True

    def described_end(self) -> str:
        """Returns in words how the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        if code is None:
            return "no answer"
        return f"exit code {code}" if code >= 0 else signal_name(-code)

    def __enter__(self) -> "MeasuringProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
