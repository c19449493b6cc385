"""What this machine has: cores, memory, open files, shared memory."""

import os
import resource
from pathlib import Path, PurePosixPath

from tfdist.doctor.finding import OK, WARNING, Finding
from tfdist.doctor.situation import Situation
from tfdist.doctor.tensorflow_start import nvidia_devices
from tfdist.doctor.units import format_bytes, format_count

# A worker at rest holds TensorFlow and Keras. The rest is float32: weights, two moments, gradient, and a send buffer.
_WORKER_BYTES = 800_000_000
_BYTES_OF_A_PARAMETER = 5 * 4
_LEAST_OPEN_FILES = 1024
_OPEN_FILES_OF_A_TASK = 32
_LEAST_SHARED_BYTES = 512 * 2**20


def check_cores(situation: Situation) -> list[Finding]:
    """Whether each worker of this machine has a core."""
    cores, workers, all_cores = situation.cores, situation.workers, os.cpu_count() or 1
    limit = "" if cores >= all_cores else f" (of {all_cores}: the rest is kept away by affinity or a CPU quota)"
    found = f"{cores} usable{limit}, for {_workers(workers)}"
    if cores >= workers:
        return [Finding(OK, "cores", found)]
    remedy = f"Start at most {_workers(cores)} here, or give the job or container more cores; else they take turns."
    return [Finding(WARNING, "cores", found, "at least one core a worker", remedy)]


def check_memory(situation: Situation) -> list[Finding]:
    """Whether the free memory is enough for the workers of this machine, without their data and activations."""
    available = available_memory_bytes(situation.root)
    if available is None:
        return [Finding(OK, "memory", "not known on this system")]
    need = situation.workers * (_WORKER_BYTES + _BYTES_OF_A_PARAMETER * situation.parameters)
    asked = f"{_workers(situation.workers)} with {format_count(situation.parameters)} parameters"
    if available >= need:
        return [Finding(OK, "memory", f"{format_bytes(available)} free; {asked} need about {format_bytes(need)}")]
    expected = f"about {format_bytes(need)} for {asked}, and room for data and activations on top"
    remedy = "Start fewer workers here, end what else uses memory, or raise the limit of the job or container."
    return [Finding(WARNING, "memory", f"{format_bytes(available)} free", expected, remedy)]


def check_open_files(situation: Situation) -> list[Finding]:
    """Whether this process may have as many open files as its connections to all tasks need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = max(_LEAST_OPEN_FILES, _OPEN_FILES_OF_A_TASK * (len(situation.addresses) + 1))
    found = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft in (resource.RLIM_INFINITY, -1) or soft >= need:
        return [Finding(OK, "open files", found)]
    can_raise = hard == resource.RLIM_INFINITY or hard >= need
    remedy = f"ulimit -n {need}" if can_raise else f"Have the hard limit ({hard}) raised to {need} (limits.conf)."
    return [Finding(WARNING, "open files", found, f"at least {need}", remedy)]


def check_shared_memory(situation: Situation) -> list[Finding]:
    """Whether `/dev/shm` is large enough for NCCL, where there are GPUs."""
    gpus = len(nvidia_devices(situation.root))
    try:
        status = os.statvfs(situation.root / "dev/shm")
    except OSError as error:
        size, found = 0, f"/dev/shm: {error.strerror}"
    else:
        size = status.f_frsize * status.f_bavail
        found = f"{format_bytes(size)} free in /dev/shm"
    if not gpus:
        return [Finding(OK, "shared memory", f"{found}; only GPUs need it")]
    if size >= _LEAST_SHARED_BYTES:
        return [Finding(OK, "shared memory", found)]
    expected = f"at least {format_bytes(_LEAST_SHARED_BYTES)}: NCCL exchanges through it between the GPUs of a host"
    remedy = "docker run --shm-size=1g; in Kubernetes mount an emptyDir of medium Memory at /dev/shm."
    return [Finding(WARNING, "shared memory", found, expected, remedy)]


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory that new processes can get: what is free, cut to what the cgroups leave.

    Args:
        root: Where `proc` and `sys` are found.
    """
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    words = fields.get("MemAvailable", "").split()
    free = [1024 * int(words[0])] if words and words[0].isdigit() else []
    return max(0, min(left)) if (left := [*free, *_cgroups_leave(root)]) else None


def _cgroups_leave(root: Path) -> list[int]:
    left = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        below = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, while the mount shows the container's own group at the top.
        groups = (below, *below.parents)
        if hierarchy == "0" and not controllers:
            names, mount = ("memory.max", "memory.current", "inactive_file"), root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        left += [free for group in groups if (free := _group_leaves(mount / group, *names)) is not None]
    return left


def _group_leaves(group: Path, limit_name: str, used_name: str, cache_name: str) -> int | None:
    limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
    if not (limit.isdigit() and used.isdigit()):
        return None
    stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    cache = stat.get(cache_name, "0").strip()  # the kernel takes it back when it is needed
    return int(limit) - int(used) + (int(cache) if cache.isdigit() else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
