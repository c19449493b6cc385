"""Checks the resources of this machine: cores, memory, open files, shared memory."""

import os
import resource
from pathlib import Path

from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.report import OK, WARNING, Finding
from tfdist.utils.cgroup_limits import available_memory_bytes
from tfdist.utils.formatting import counted, format_bytes, format_count

# An idle worker holds TensorFlow and Keras. The rest is float32: weights, two moments, gradient, and a send buffer.
_IDLE_WORKER_BYTES = 800_000_000
_BYTES_PER_PARAMETER = 5 * 4
_MIN_OPEN_FILES = 1024
_OPEN_FILES_PER_TASK = 32
_MIN_SHARED_BYTES = 512 * 2**20


def check_cores(context: CheckContext) -> list[Finding]:
    """Checks that each worker of this machine has a core."""
    cores, workers, all_cores = context.cores, context.workers, os.cpu_count() or 1
    limit = "" if cores >= all_cores else f" (of {all_cores}; CPU affinity or a CPU quota limits them)"
    found = f"{cores} usable{limit}, for {counted(workers, 'worker')}"
    if cores >= workers:
        return [Finding(OK, "cores", found)]
    remedy = f"Start at most {counted(cores, 'worker')} here, or give the job or container more cores."
    return [Finding(WARNING, "cores", found, "at least one core per worker", remedy)]


def check_memory(context: CheckContext) -> list[Finding]:
    """Checks that the free memory suffices for the workers of this machine, without data and activations."""
    available = available_memory_bytes(context.root)
    if available is None:
        return [Finding(OK, "memory", "not known on this system")]
    need = context.workers * (_IDLE_WORKER_BYTES + _BYTES_PER_PARAMETER * context.parameters)
    workers = f"{counted(context.workers, 'worker')} with {format_count(context.parameters)} parameters"
    if available >= need:
        return [Finding(OK, "memory", f"{format_bytes(available)} free; {workers} need about {format_bytes(need)}")]
    expected = f"about {format_bytes(need)} for {workers}, plus memory for data and activations"
    remedy = "Start fewer workers here, end other programs, or raise the limit of the job or container."
    return [Finding(WARNING, "memory", f"{format_bytes(available)} free", expected, remedy)]


def check_open_files(context: CheckContext) -> list[Finding]:
    """Checks that this process may open as many files as its connections to all tasks need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = max(_MIN_OPEN_FILES, _OPEN_FILES_PER_TASK * (len(context.addresses) + 1))
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft in (resource.RLIM_INFINITY, -1) or soft >= need:
        return [Finding(OK, "open files", found)]
    can_raise = hard == resource.RLIM_INFINITY or hard >= need
    remedy = f"ulimit -n {need}" if can_raise else f"Raise the hard limit ({hard}) to {need} (limits.conf)."
    return [Finding(WARNING, "open files", found, f"at least {need}", remedy)]


def check_shared_memory(context: CheckContext) -> list[Finding]:
    """Checks that `/dev/shm` is large enough for NCCL, if the machine has GPUs."""
    gpus = len(nvidia_devices(context.root))
    try:
        status = os.statvfs(context.root / "dev/shm")
    except OSError as error:
        size, found = 0, f"/dev/shm: {error.strerror}"
    else:
        size = status.f_frsize * status.f_bavail
        found = f"{format_bytes(size)} free in /dev/shm"
    if not gpus:
        return [Finding(OK, "shared memory", f"{found}; only GPUs need it")]
    if size >= _MIN_SHARED_BYTES:
        return [Finding(OK, "shared memory", found)]
    expected = f"at least {format_bytes(_MIN_SHARED_BYTES)}: NCCL uses it for the exchange between the GPUs of a host"
    remedy = "docker run --shm-size=1g; in Kubernetes mount an emptyDir of medium Memory at /dev/shm."
    return [Finding(WARNING, "shared memory", found, expected, remedy)]


def nvidia_devices(root: Path) -> list[str]:
    """Returns the device files of NVIDIA GPUs, whether or not a program can use them."""
    return sorted(file.name for file in (root / "dev").glob("nvidia[0-9]*"))
