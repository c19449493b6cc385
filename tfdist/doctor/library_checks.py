"""Checks which versions are installed, and that all tasks have the same."""

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Mapping

import tfdist
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
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
