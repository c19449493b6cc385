"""Checks which versions are installed, that all tasks have the same, and that TensorFlow starts, in a child process."""

import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tfdist
from tfdist.doctor.check_context import CheckContext, python_path
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
from tfdist.doctor.resource_checks import nvidia_devices
from tfdist.utils.formatting import format_bytes, printable, signal_name
from tfdist.versions import installed_versions, is_within, oldest_supported, tested_ranges

SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13))
_FRAMEWORKS = ("tensorflow", "keras")


def check_python(context: CheckContext) -> list[Finding]:
    """Checks that TensorFlow exists for this version of Python."""
    del context
    version = platform.python_version()
    if sys.version_info[:2] in SUPPORTED_PYTHONS:
        return [Finding(OK, "python", version)]
    expected = f"{_dotted(SUPPORTED_PYTHONS[0])} to {_dotted(SUPPORTED_PYTHONS[-1])}"
    remedy = "Create an environment with one of these versions: TensorFlow has no wheels for others."
    return [Finding(ERROR, "python", version, expected, remedy)]


def check_libraries(context: CheckContext) -> list[Finding]:
    """Checks that TensorFlow, Keras and the other dependencies are installed, and their versions."""
    del context
    known = installed_versions()
    findings = []
    for name, tested in tested_ranges().items():
        expected = f"{name}{','.join(sorted(map(str, tested), reverse=True))}"
        version = known.get(name) or _installed(name)
        if version is None and _has_module(name):
            found = "of unknown version, from a package of another name"
            remedy = f"None if this version fits: python -c 'import {name}; print({name}.__version__)'"
            findings.append(Finding(WARNING, name, found, expected, remedy))
        elif version is None:
            findings.append(Finding(ERROR, name, "not installed", expected, f'pip install "{expected}"'))
        elif not is_within(version, tested):
            remedy = f'Install a tested version: pip install "{expected}"'
            is_newer = name in known and is_within(version, oldest_supported(name))
            level, problem = (WARNING, "is not tested with") if is_newer else (ERROR, "does not support")
            findings.append(Finding(level, name, f"{version}, which tfdist {problem}", expected, remedy))
        else:
            findings.append(Finding(OK, name, version))
    return findings


def check_hash_seed(context: CheckContext) -> list[Finding]:
    """Checks that the workers of a cluster have one seed for the hashes of strings, which order sets.

    Python reads it when it starts, so that a program cannot set its own. `tfdist run` sets it.
    """
    if context.config is None or len(context.config.cluster.workers) < 2:
        return []
    seed = context.environ.get("PYTHONHASHSEED") or "random"
    if seed != "random":
        return [Finding(OK, "hash seed", f"PYTHONHASHSEED={seed}")]
    return [
        Finding(
            WARNING,
            "hash seed",
            "each worker orders sets of strings in its own way",
            "the same PYTHONHASHSEED on all workers",
            "export PYTHONHASHSEED=0 before the workers start: labels that are numbered by a set differ otherwise.",
        )
    ]


def own_versions() -> dict[str, str]:
    """Returns the versions that all tasks must share: Python (without its patch), tfdist, TensorFlow, Keras."""
    return {
        "python": _dotted(sys.version_info[:2]),
        "tfdist": tfdist.__version__,
        **{
            name: installed_versions().get(name) or ("unknown version" if _has_module(name) else "not installed")
            for name in _FRAMEWORKS
        },
    }


def compare_versions(by_task: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Compares the versions of all tasks.

    >>> [finding] = compare_versions({"worker 0": {"keras": "3.15.0"}, "worker 1": {"keras": "3.14.0"}})
    >>> finding.level, finding.found
    ('error', 'keras 3.15.0 on worker 0; keras 3.14.0 on worker 1')
    """
    findings = []
    for name in sorted({name for versions in by_task.values() for name in versions}):
        tasks: dict[str, list[str]] = {}
        for task, versions in by_task.items():
            tasks.setdefault(versions.get(name, "unknown"), []).append(task)
        if len(tasks) > 1:
            found = "; ".join(f"{name} {version} on {', '.join(where)}" for version, where in tasks.items())
            remedy = f"Install the same {name} on all hosts: each worker traces its graph; all must be equal."
            findings.append(Finding(ERROR, "same versions", found, f"one version of {name} on all tasks", remedy))
    if not findings and len(by_task) > 1:
        (versions, *_) = by_task.values()
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        findings.append(Finding(OK, "same versions", f"on all {len(by_task)} tasks: {found}"))
    return findings


def _has_module(name: str) -> bool:
    """Whether TensorFlow or Keras can be imported, also from a vendor's package; imports neither."""
    return name in _FRAMEWORKS and importlib.util.find_spec(name) is not None


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


START_TIMEOUT_SECONDS = 120.0
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
    context: CheckContext, *, program: str = PROGRAM, timeout_seconds: float = START_TIMEOUT_SECONDS
) -> list[Finding]:
    """Checks that TensorFlow starts, which devices it finds, and that it has the private symbols that tfdist uses."""
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
            return _start_findings(result, context)
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


def _start_findings(result: dict[str, Any], context: CheckContext) -> list[Finding]:
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
