"""Imports TensorFlow, Keras and tfdist in a child process, and checks devices, backend and private symbols."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tfdist.doctor.check_context import CheckContext, python_path
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
from tfdist.utils.formatting import format_bytes, printable, signal_name

TIMEOUT_SECONDS = 120.0
_LAST_LINES = 3
_END_SECONDS = 5.0

# A string and not a module: no module of this package may import TensorFlow.
PROGRAM = """
import json, resource, time
began = time.monotonic()
import tensorflow as tf
import keras
result = {"seconds": time.monotonic() - began, "backend": keras.backend.backend(), "missing": ""}
result["devices"] = [
    [device.device_type, tf.config.experimental.get_device_details(device).get("device_name", "")]
    for device in tf.config.list_physical_devices()
]
try:
    import tfdist.strategies
    from tfdist.private_symbols import used_symbols
    result["symbols"] = sum(not symbol.is_of_instances for symbol in used_symbols())
except ImportError as error:
    result["missing"] = str(error)
result["bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("\\n" + json.dumps(result))
"""


def check_tensorflow_start(
    context: CheckContext, *, program: str = PROGRAM, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Finding]:
    """Checks that TensorFlow starts, which devices it finds, and that it has the private symbols that tfdist uses.

    The child gets the environment of the checks without the cluster.
    """
    code, output, errors = _run(context, program, timeout_seconds)
    last_lines = "; ".join(printable(line.strip()) for line in errors.splitlines()[-_LAST_LINES:])
    if code is None:
        expected = f"an import of TensorFlow in less than {timeout_seconds:g} s"
        remedy = "Check whether the file system of the environment or a GPU driver (nvidia-smi) hangs."
        return [
            Finding(
                ERROR, "tensorflow start", f"still running after {timeout_seconds:g} s ({last_lines})", expected, remedy
            )
        ]
    try:
        result = json.loads(output.splitlines()[-1])
        if code == 0 and isinstance(result, dict):
            return _findings(result, context)
    except (ValueError, IndexError):
        pass
    return [Finding(ERROR, "tensorflow start", *_crash(code, last_lines))]


def _run(context: CheckContext, program: str, timeout_seconds: float) -> tuple[int | None, str, str]:
    environ = {name: value for name, value in context.environ.items() if name != "TF_CONFIG"}
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        env={**environ, "PYTHONPATH": python_path(context.environ)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=timeout_seconds)
        return child.returncode, output, errors
    except subprocess.TimeoutExpired as late:
        return None, "", late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else ""
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # another process may hold its output open
                child.communicate(timeout=_END_SECONDS)


def _crash(code: int, last_lines: str) -> tuple[str, str, str]:
    expected = "an import of TensorFlow, Keras and tfdist without an error"
    if code >= 0:
        remedy = "Repair the environment: the last lines say what is missing. See also pip check."
        return f"the import ended with exit code {code}: {last_lines}", expected, remedy
    name = signal_name(-code)
    remedy = {
        "SIGILL": "This TensorFlow needs a newer processor: install a build for this one, or use another host.",
        "SIGKILL": "Possibly the OOM killer (see dmesg): give the job or container more memory.",
    }.get(name, "Reinstall TensorFlow, and check that its GPU libraries fit the driver.")
    return f"the import was ended by {name}: {last_lines}", expected, remedy


def _findings(result: dict[str, Any], context: CheckContext) -> list[Finding]:
    took = f"{result['seconds']:.1f} s to import, {format_bytes(result['bytes'])} of memory"
    return [
        Finding(OK, "tensorflow start", took),
        _devices([(str(kind), str(name)) for kind, name in result["devices"]], context.root),
        _backend(str(result["backend"])),
        _symbols(result),
    ]


def _devices(devices: list[tuple[str, str]], root: Path) -> Finding:
    counts = collections.Counter((kind, name) for kind, name in devices)
    found = ", ".join(f"{count} {kind}{f' ({name})' if name else ''}" for (kind, name), count in counts.items())
    present = len(nvidia_devices(root))
    if present and not any(kind == "GPU" for kind, _ in devices):
        remedy = (
            'Install the GPU libraries (pip install "tensorflow[and-cuda]"), check CUDA_VISIBLE_DEVICES, and run '
            "python -c 'import tensorflow as tf; tf.config.list_physical_devices()' to see why TensorFlow skips it."
        )
        found = f"TensorFlow sees {found}, but this machine has {present} NVIDIA GPU(s)"
        return Finding(WARNING, "devices", found, "the GPUs among TensorFlow's devices", remedy)
    return Finding(OK, "devices", found)


def _backend(backend: str) -> Finding:
    if backend == "tensorflow":
        return Finding(OK, "keras backend", backend)
    remedy = "Set KERAS_BACKEND=tensorflow, or correct ~/.keras/keras.json."
    return Finding(ERROR, "keras backend", backend, "tensorflow", remedy)


def _symbols(result: dict[str, Any]) -> Finding:
    if not result["missing"]:
        return Finding(OK, "private symbols", f"all {result['symbols']} that tfdist uses exist")
    remedy = "Install versions with which tfdist is tested."
    return Finding(ERROR, "private symbols", printable(result["missing"]), "every symbol that tfdist uses", remedy)


def nvidia_devices(root: Path) -> list[str]:
    """Returns the device files of NVIDIA GPUs, whether or not a program can use them."""
    return sorted(file.name for file in (root / "dev").glob("nvidia[0-9]*"))
