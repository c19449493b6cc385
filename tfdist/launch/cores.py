"""How many cores this process may use, and how the workers share them."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores this process may use: its affinity, cut to the CPU quota of its cgroups.

    Args:
        root: Where `proc` and `sys` are found.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *map(int, _cgroup_quotas(root))]))


class ThreadShare:
    """The threads of each worker.

    Args:
        workers: Number of workers.
        cores: Number of usable cores.
        chosen: Threads of each worker where the user said so: it beats the environment.
        environ: The launcher's environment. What it sets already is left alone.
        who: What they are, for the user, where they are not all workers.

    >>> share = ThreadShare(2, 4, None, {"OMP_NUM_THREADS": "1"})
    >>> share.environment()
    {'TF_NUM_INTRAOP_THREADS': '2', 'TF_NUM_INTEROP_THREADS': '2'}
    >>> ThreadShare(2, 2, None, {}).describe()
    '2 workers, 1 thread each (2 usable cores)'
    """

    def __init__(
        self, workers: int, cores: int, chosen: int | None, environ: Mapping[str, str], *, who: str = ""
    ) -> None:
        self._who, self._cores = who or _counted(workers, "worker"), cores
        self._threads = max(1, cores // workers) if chosen is None else chosen
        self._kept = {} if chosen is not None else {name: environ[name] for name in THREAD_VARIABLES if name in environ}

    def environment(self) -> dict[str, str]:
        """Returns the variables to set in each worker."""
        return {name: str(self._threads) for name in THREAD_VARIABLES if name not in self._kept}

    def describe(self) -> str:
        """Returns the line that says so at the start."""
        share = f"{_counted(self._threads, 'thread')} each"
        if self._kept:
            kept = ", ".join(f"{name}={value}" for name, value in self._kept.items())
            all_kept = len(self._kept) == len(THREAD_VARIABLES)
            share = f"{kept} from the environment" + ("" if all_kept else f", otherwise {share}")
        return f"{self._who}, {share} ({_counted(self._cores, 'usable core')})"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cgroup_quotas(root: Path) -> list[float]:
    """Returns the quotas, in cores, of this process's cgroups and all their parents, both cgroup versions."""
    quotas: list[float] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if hierarchy == "0" and not controllers:
            mounts, read = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), _quota_v2
        elif "cpu" in controllers.split(","):
            mounts, read = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"), _quota_v1
        else:
            continue
        below = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, while the mount shows the container's own group at the top.
        for parent in (below, *below.parents):
            quotas.extend(quota for mount in mounts if (quota := read(root / mount / parent)) is not None)
    return quotas


def _quota_v2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _quota_v1(group: Path) -> float | None:
    quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
