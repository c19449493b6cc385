"""Measures a program and this machine in child processes, within a time limit. It does not import TensorFlow."""

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tfdist.planning.measurements import Measurements
from tfdist.probe.measuring_process import MeasuringProcess, child_environment
from tfdist.probe.probe_errors import ProbeError
from tfdist.utils.cgroup_limits import available_memory
from tfdist.utils.cores_and_ports import ReservedPorts, ThreadShare, usable_cores

_TRANSFER_SECONDS = 14.0  # what is left for the two processes after the program was measured
_LOCAL_WORKERS = 2
_LIBRARIES = ("tensorflow", "keras", "numpy")


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

    Raises:
        ProbeError: The program never calls `fit`, fails, or takes too long; an argument is invalid.
    """
    _check_script(script)
    began = time.monotonic()
    cores = usable_cores()
    own = max(1, cores // _LOCAL_WORKERS) if cores_per_worker is None else max(1, min(cores_per_worker, cores))
    environ = {**child_environment(os.environ), **ThreadShare(1, own, None, os.environ).environment()}
    request = {
        "workers": sorted({*workers}),
        "methods": list(methods),
        "with_xla": with_xla,
        "timeout_seconds": max(timeout_seconds - _TRANSFER_SECONDS, timeout_seconds / 2),
        "started": time.time(),
    }
    result = _measure_program(script, request, {**environ, "TFDIST_PROBE": "1"}, own, timeout_seconds)
    left = timeout_seconds - (time.monotonic() - began)
    one_core = {**environ, **ThreadShare(1, 1, None, os.environ).environment()}
    found = _measure_transfers(one_core, left, timeout_seconds)
    machine = {
        "cores": cores,
        "cores_per_worker": own,
        "memory_bytes": _memory_bytes(),
        "connection_bytes": max(found.pop("peak_bytes") - result["bare_bytes"], 0),
        **found,
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
    with MeasuringProcess("tfdist.probe", arguments, environ, cores=range(cores)) as child:
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


def _memory_bytes() -> int:
    """Returns the memory that is available to new processes; 0 if that is not known."""
    limits = available_memory()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        limits.append(1024 * int(fields["MemAvailable"].split()[0]))
    except (OSError, KeyError, ValueError):
        pass
    return min(limits, default=0)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "unknown"
    return found
