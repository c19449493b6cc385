"""Measures a program and this machine in child processes, pinned to cores, within a time limit. Without TensorFlow."""

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tfdist
from tfdist.planning.measurements import Measurements
from tfdist.utils.cgroup_limits import available_memory_bytes
from tfdist.utils.cores_and_ports import ReservedPorts, ThreadShare, usable_cores
from tfdist.utils.formatting import signal_name
from tfdist.utils.linux_syscalls import die_with_parent

_TRANSFER_SECONDS = 14.0  # what is left for the two processes after the program was measured
_LOCAL_WORKERS = 2
_LIBRARIES = ("tensorflow", "keras", "numpy")


class ProbeError(RuntimeError):
    """A program or a machine cannot be measured; the message says why and what to do."""


def measure(
    script: Sequence[str],
    *,
    workers: Sequence[int],
    methods: Sequence[str],
    with_xla: bool,
    timeout_seconds: float,
    cores_per_worker: int | None = None,
) -> Measurements:
    """Runs a program up to its first `fit`, measures the model there, then the transfers of this machine.

    The program gets the environment and the output of this process. Its callbacks, its validation data and everything
    after the first `fit` are not used, and nothing is written.

    Args:
        script: The program and its arguments, as `["train.py", "--epochs", "3"]`.
        workers: Numbers of workers, at least 1, whose parts of a batch are measured.
        methods: Names of compression methods whose exchange is measured, beside the uncompressed one.
        with_xla: Whether steps are measured with `jit_compile=True`, too.
        timeout_seconds: The limit of all together. Less important measurements are left out when it comes near.
        cores_per_worker: The cores of a worker. By default those of one of two workers on this machine.
    """
    _check_script(script)
    began = time.monotonic()
    cores = usable_cores()
    worker_cores = max(1, cores // _LOCAL_WORKERS) if cores_per_worker is None else max(1, min(cores_per_worker, cores))
    environ = {**child_environment(os.environ), **ThreadShare(1, worker_cores, None, os.environ).environment()}
    request = {
        "workers": sorted({*workers}),
        "methods": list(methods),
        "with_xla": with_xla,
        "timeout_seconds": max(timeout_seconds - _TRANSFER_SECONDS, timeout_seconds / 2),
        "started": time.time(),
    }
    result = _measure_program(script, request, {**environ, "TFDIST_PROBE": "1"}, worker_cores, timeout_seconds)
    seconds_left = timeout_seconds - (time.monotonic() - began)
    one_core = {**environ, **ThreadShare(1, 1, None, os.environ).environment()}
    measured_transfers = _measure_transfers(one_core, seconds_left, timeout_seconds)
    machine = {
        "cores": cores,
        "cores_per_worker": worker_cores,
        "memory_bytes": available_memory_bytes() or 0,
        "connection_bytes": max(measured_transfers.pop("peak_bytes") - result["bare_bytes"], 0),
        **measured_transfers,
    }
    return Measurements.from_json({"program": result["program"], "machine": machine, "versions": _versions()})


def _check_script(script: Sequence[str]) -> None:
    if not script or not Path(script[0]).is_file():
        raise ProbeError(
            f"The program to measure is not a file. Received: {script[0] if script else 'no program'}. Expected: a "
            "Python script that trains a Keras model by `fit`. Give the path of the script, as for `python`."
        )


def _measure_program(
    script: Sequence[str], request: Mapping[str, Any], environ: Mapping[str, str], cores: int, limit: float
) -> dict[str, Any]:
    arguments = [json.dumps(request), *script]
    stage = "started"
    with MeasuringProcess("tfdist.probe.program_child", arguments, environ, cores=range(cores)) as child:
        for message in child.messages(limit):
            stage = message.get("stage", stage)
            if "result" in message:
                return dict(message["result"])
            if "raised" in message:
                raise ProbeError(
                    f"The program failed before it was measured. Received: {message['raised']}. Expected: a program "
                    "that reaches its first `fit` as one process, and whose model can train. Run it once with "
                    "`python`; the lines above say where it failed."
                )
            if "no_fit" in message:
                raise ProbeError(
                    f"The program never calls `fit`. Received: {script[0]}, which has ended. Expected: a program that "
                    "trains by `Model.fit` of Keras, whose first call is measured. Give the arguments with which it "
                    "trains, or write a short program that builds the model and calls `fit` on a few batches."
                )
        if child.timed_out:
            raise _too_slow(limit, f"the measuring process {stage}")
        raise ProbeError(
            f"The process that measures the program has ended unexpectedly. Received: {child.described_end()} while "
            f"it {stage}. Expected: a measured `fit`. If it was killed, give it more memory; run the program once "
            "with `python`."
        )


def _measure_transfers(environ: Mapping[str, str], seconds: float, limit: float) -> dict[str, Any]:
    """Returns `transfers`, `local_transfers`, and `peak_bytes`, the memory of a process that has made them."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    with ReservedPorts(_LOCAL_WORKERS) as reserved:
        addresses = [f"127.0.0.1:{port}" for port in reserved.ports]
    environ = {**environ, "TFDIST_TOKEN": secrets.token_hex()}
    module = "tfdist.probe.transfer_child"
    cores = [[index % len(available)] for index in range(_LOCAL_WORKERS)]
    with (
        MeasuringProcess(module, ["0", *addresses], environ, cores=cores[0]) as first,
        MeasuringProcess(module, ["1", *addresses], environ, cores=cores[1]),
    ):
        for message in first.messages(max(seconds, 1.0)):
            return dict(message)
        if first.timed_out:
            raise _too_slow(limit, "two processes measured their transfers")
        raise ProbeError(
            "The transfers between two processes of this machine cannot be measured. Received: "
            f"{first.described_end()}. Expected: two processes that connect to each other on 127.0.0.1. Run `tfdist "
            "doctor --workers 2`, which finds the cause."
        )


def _too_slow(limit: float, stage: str) -> ProbeError:
    return ProbeError(
        f"The measurement took longer than its limit. Received: {limit:g} s, after which {stage}. Expected: a program "
        "that calls `fit` soon, with steps of at most a few seconds. Let it load less data, or raise the limit."
    )


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "unknown"
    return versions


_CHUNK_BYTES = 1 << 16
_STDERR = 2
# Variables by which `tfdist.cluster.detect` finds a cluster, also Slurm's and Kubernetes', and those of `tfdist run`.
_CLUSTER_VARIABLES = frozenset(
    "TF_CONFIG SLURM_STEP_ID TFDIST_NUM_WORKERS TFDIST_SERVICE TFDIST_RUN_ID TFDIST_ATTEMPT TFDIST_FULL_WORKERS".split()
)
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child that is in no cluster, finds this tfdist, and writes no compiled modules."""
    inherited = {name: value for name, value in environ.items() if name not in _CLUSTER_VARIABLES}
    path = os.pathsep.join([str(Path(tfdist.__file__).parents[1]), environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {_LOG_LEVEL: "2", **inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class MeasuringProcess:
    """Runs a module of tfdist as a program, whose first argument is the descriptor of a pipe to this process.

    Its output goes to the standard error of this process. It leads a process group, which is killed when the `with`
    block ends, and when this process dies.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], *, cores: Sequence[int]
    ) -> None:
        """Starts the process. `cores` are the numbers of its cores among the usable ones."""
        self.timed_out = False  # whether `messages` has ended because of its limit
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
            while (seconds_left := end - time.monotonic()) > 0:
                if not selector.select(seconds_left):
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

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
