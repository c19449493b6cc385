"""Finds the GPUs of this machine, describes it, and divides a GPU; only this needs TensorFlow."""

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("tensorflow", "keras", "numpy", "nvidia-cudnn-cu12", "nvidia-nccl-cu12")
_QUERY = "name,memory.total,driver_version,compute_cap"
_LIMIT_SECONDS = 20.0
_TORCH = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"


def visible_gpus() -> int:
    """Returns the number of NVIDIA GPUs that a program of this process may use; 0 if they are hidden from it."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [name.strip() for name in visible.split(",")]
    return min(present, next((i for i, name in enumerate(named) if name in ("", "-1")), len(named)))


def describe(torch_python: str | None) -> dict[str, Any]:
    """Returns the date, the versions, the processor and the GPUs."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "gpus": _lines(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "torch": " ".join(_lines([torch_python, "-c", _TORCH])) if torch_python else "",
        "command": " ".join(sys.argv[1:]),
    }


def divide_device(kind: str, parts: int, megabytes: int) -> None:
    """Divides the first device of TensorFlow in this process, if there are to be several parts.

    Args:
        kind: "GPU" or "CPU".
        parts: The number of logical devices.
        megabytes: The memory of each part of a GPU.

    Raises:
        SystemExit: TensorFlow sees no such device.
    """
    import tensorflow as tf

    found = tf.config.list_physical_devices(kind)
    if not found:
        raise SystemExit(f"Error: TensorFlow sees no {kind}. It sees: {tf.config.list_physical_devices()}")
    if parts > 1:
        logical = tf.config.LogicalDeviceConfiguration(memory_limit=megabytes if kind == "GPU" else None)
        tf.config.set_logical_device_configuration(found[0], [logical] * parts)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _lines(command: list[str]) -> list[str]:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]
