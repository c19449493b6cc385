"""The peak of this process's memory between two points in time; Linux only."""

from pathlib import Path

# Memory of this size and more is returned when it is freed, so that the peak shows what is used at a time. With oneDNN,
# TensorFlow keeps what it frees.
RETURNING_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}
_RESET_PEAK = "5"


def start_peak() -> int:
    """Forgets the peak so far; returns the bytes in use."""
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return _status("VmRSS")


def peak() -> int:
    """Returns the most bytes that were in use since `start_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
