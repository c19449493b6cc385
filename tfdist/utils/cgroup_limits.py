"""Limits of this process's control groups (cgroups v1 and v2): CPU quotas and available memory.

Standard library only. A container or a job scheduler sets these limits; the number of cores and the free memory of the
machine do not show them.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_V2_MOUNTS = ("", "unified")
_V1_MOUNTS = {"cpu": ("cpu", "cpu,cpuacct"), "memory": ("memory",)}


def cpu_quotas(root: Path = Path("/")) -> list[float]:
    """Returns the CPU quotas, in cores, of this process's groups and all their parents; `root` has `proc` and `sys`."""
    quotas = []
    for is_v2, group in _groups(root, "cpu"):
        if is_v2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return quotas


def available_memory(root: Path = Path("/")) -> list[int]:
    """Returns the bytes that this process's groups and all their parents have left; reclaimable file caches count."""
    available = []
    for is_v2, group in _groups(root, "memory"):
        limit = _read(group / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _read(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if not (limit.isdigit() and used.isdigit()):
            continue
        stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
        cache = stat.get("inactive_file" if is_v2 else "total_inactive_file", "0").strip()
        available.append(int(limit) - int(used) + (int(cache) if cache.isdigit() else 0))
    return available


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns the memory that new processes can get: what the machine and the cgroups have left; None: not known."""
    fields = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    words = fields.get("MemAvailable", "").split()
    limits = [1024 * int(words[0])] if words and words[0].isdigit() else []
    limits += available_memory(root)
    return max(0, min(limits)) if limits else None


def _groups(root: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yields (whether it is cgroups v2, directory) of this process's groups with a controller, and their parents."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        is_v2 = hierarchy == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        below = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, while the mount has the container's own group at the top.
        for group in (below, *below.parents):
            for mount in _V2_MOUNTS if is_v2 else _V1_MOUNTS[controller]:
                yield is_v2, root / "sys/fs/cgroup" / mount / group


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
