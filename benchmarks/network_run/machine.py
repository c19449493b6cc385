"""Describes the machine of a measurement."""

import os
import platform
from pathlib import Path
from typing import Any


def machine_info() -> dict[str, Any]:
    """Returns the number of `cores` that this process may use, the `cpu` and the `kernel`; Linux only."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": models[0] if models else platform.machine(),
        "kernel": platform.release(),
    }
