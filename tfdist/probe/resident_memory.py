"""The resident memory of this process on Linux, and its peak since a moment."""

import contextlib
import resource
from pathlib import Path

_RESET_PEAK = "5"  # of proc_pid_clear_refs(5)


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
