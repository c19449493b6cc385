"""Imports TensorFlow, Keras and tfdist in a child process: devices, backend, private symbols."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tfdist
from tfdist.doctor.finding import ERROR, OK, WARNING, Finding, printable
from tfdist.doctor.situation import Situation
from tfdist.doctor.units import format_bytes

LIMIT_SECONDS = 120.0
_LAST_LINES = 3
_END_SECONDS = 5.0

# A text and not a module: nothing of this package may import TensorFlow.
PROGRAM = """
import json, resource, time
began = time.monotonic()
import tensorflow as tf
import keras
said = {"seconds": time.monotonic() - began, "backend": keras.backend.backend(), "missing": ""}
said["devices"] = [
    [device.device_type, tf.config.experimental.get_device_details(device).get("device_name", "")]
    for device in tf.config.list_physical_devices()
]
try:
    import tfdist.strategies
    from tfdist.private_symbols import used_symbols
    said["symbols"] = len(used_symbols())
except ImportError as error:
    said["missing"] = str(error)
said["bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("\\n" + json.dumps(said))
"""


def check_tensorflow_start(
    situation: Situation, *, program: str = PROGRAM, limit_seconds: float = LIMIT_SECONDS
) -> list[Finding]:
    """Whether TensorFlow starts, what it sees, and whether it has what tfdist builds on.

    Args:
        situation: The environment is the child's, without a cluster.
        program: What the child runs.
        limit_seconds: How long it may take.
    """
    code, output, errors = _run(situation, program, limit_seconds)
    last = "; ".join(printable(line.strip()) for line in errors.splitlines()[-_LAST_LINES:])
    if code is None:
        expected = f"an import of TensorFlow in less than {limit_seconds:g} s"
        remedy = "Look whether the file system of the environment, or a GPU's driver (nvidia-smi), hangs."
        return [Finding(ERROR, "tensorflow start", f"no end after {limit_seconds:g} s ({last})", expected, remedy)]
    try:
        said = json.loads(output.splitlines()[-1])
        if code == 0 and isinstance(said, dict):
            return _findings(said, situation)
    except (ValueError, IndexError):
        pass
    return [Finding(ERROR, "tensorflow start", *_crash(code, last))]


def _run(situation: Situation, program: str, limit_seconds: float) -> tuple[int | None, str, str]:
    path = os.pathsep.join([str(Path(tfdist.__file__).parents[1]), situation.environ.get("PYTHONPATH", "")])
    environ = {name: value for name, value in situation.environ.items() if name != "TF_CONFIG"}
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        env={**environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=limit_seconds)
        return child.returncode, output, errors
    except subprocess.TimeoutExpired as late:
        return None, "", late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else ""
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # something else may hold its output open
                child.communicate(timeout=_END_SECONDS)


def _crash(code: int, last: str) -> tuple[str, str, str]:
    expected = "an import of TensorFlow, Keras and tfdist without an error"
    if code >= 0:
        remedy = "Repair the environment: the last lines say what is missing. pip check may know more."
        return f"the import ended with exit code {code}: {last}", expected, remedy
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    remedy = {
        "SIGILL": "This TensorFlow is built for newer processors: install a build for this one, or use another host.",
        "SIGKILL": "Look into dmesg: the kernel kills when memory is out. Give the job or container more of it.",
    }.get(name, "Install TensorFlow anew, and look whether its GPU libraries fit the driver.")
    return f"the import was ended by {name}: {last}", expected, remedy


def _findings(said: dict[str, Any], situation: Situation) -> list[Finding]:
    took = f"{said['seconds']:.1f} s to import, {format_bytes(said['bytes'])} of memory"
    return [
        Finding(OK, "tensorflow start", took),
        _devices([(str(kind), str(name)) for kind, name in said["devices"]], situation.root),
        _backend(str(said["backend"])),
        _symbols(said),
    ]


def _devices(devices: list[tuple[str, str]], root: Path) -> Finding:
    counts = collections.Counter((kind, name) for kind, name in devices)
    found = ", ".join(f"{count} {kind}{f' ({name})' if name else ''}" for (kind, name), count in counts.items())
    present = len(nvidia_devices(root))
    if present and not any(kind == "GPU" for kind, _ in devices):
        remedy = (
            'Install the GPU libraries (pip install "tensorflow[and-cuda]"), look at CUDA_VISIBLE_DEVICES, and start '
            "python -c 'import tensorflow as tf; tf.config.list_physical_devices()' to read why TensorFlow skips it."
        )
        found = f"TensorFlow sees {found}, but this machine has {present} NVIDIA GPU(s)"
        return Finding(WARNING, "devices", found, "the GPUs among TensorFlow's devices", remedy)
    return Finding(OK, "devices", found)


def _backend(backend: str) -> Finding:
    if backend == "tensorflow":
        return Finding(OK, "keras backend", backend)
    remedy = "Set KERAS_BACKEND=tensorflow, or correct ~/.keras/keras.json."
    return Finding(ERROR, "keras backend", backend, "tensorflow", remedy)


def _symbols(said: dict[str, Any]) -> Finding:
    if not said["missing"]:
        return Finding(OK, "private symbols", f"all {said['symbols']} that tfdist uses are there")
    remedy = "Install the versions that tfdist is tested with."
    return Finding(ERROR, "private symbols", printable(said["missing"]), "every symbol that tfdist uses", remedy)


def nvidia_devices(root: Path) -> list[str]:
    """Returns the device files of NVIDIA GPUs, whether or not anything can use them."""
    return sorted(file.name for file in (root / "dev").glob("nvidia[0-9]*"))
