"""What this process uses: its work, by a clock that other processes do not slow down where possible, and its memory.

On one core the time of a step is that during which this process ran plus that during which the core was idle. What is
left of the time that has passed was taken by other processes. On several cores, which are busy at the same time, all of
it counts.
"""

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

_IDLE_FIELDS = (4, 5)  # idle and waiting for a disk, of a line of proc_stat(5)
_RESET_PEAK = "5"  # of proc_pid_clear_refs(5)
_MIN_CALLS, _MAX_CALLS, _MIN_SECONDS = 4, 15, 0.3


def work_seconds() -> float:
    """Returns a time whose differences are those of this process's work, without idle time on one core."""
    return time.process_time() if _only_core() is not None else time.perf_counter()


def timed(call: Callable[[], object]) -> float:
    """Returns the median time of `call`, after two calls that are left out."""
    for _ in range(2):
        call()
    spent: list[float] = []
    while len(spent) < _MIN_CALLS or (len(spent) < _MAX_CALLS and sum(spent) < _MIN_SECONDS):
        start = work_seconds()
        call()
        spent.append(work_seconds() - start)
    return statistics.median(spent)


def _only_core() -> int | None:
    """Returns the number of the core of this process if it has only one."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return next(iter(cores)) if len(cores) == 1 else None


def idle_seconds() -> float:
    """Returns how long this process's only core was idle since the system has started; 0 on several cores."""
    core = _only_core()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/stat").read_text().splitlines() if core is not None else ():
            fields = line.split()
            if fields[0] == f"cpu{core}":
                return sum(int(fields[number]) for number in _IDLE_FIELDS) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Returns the largest resident memory of this process since `reset_peak`, or since its start."""
    return _status("VmHWM") or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak() -> None:
    """Sets the peak to the present resident memory, where the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def _status(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return 1024 * int(value.split()[0])
    return 0
