"""The TensorFlow and Keras versions that tfdist is tested with.

`requirements.txt` in this directory states the bounds. pip reads them when tfdist is installed, and `check_versions`
reads them again when a strategy is created, because pip can be overridden.
"""

import importlib.metadata
import warnings
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

_REQUIREMENTS_FILE = Path(__file__).with_name("requirements.txt")
_CHECKED = ("tensorflow", "keras")
# Names of distributions that contain the same modules.
_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"), "keras": ("keras", "keras-nightly")}


class UntestedVersionWarning(UserWarning):
    """The installed version of TensorFlow or Keras has not been tested with tfdist."""


def tested_ranges() -> dict[str, SpecifierSet]:
    """Returns the tested range of every dependency, by name.

    >>> from tfdist.versions import tested_ranges
    >>> "2.21.0" in tested_ranges()["tensorflow"]
    True
    >>> "2.20.0" in tested_ranges()["tensorflow"]
    False
    """
    lines = (line.partition("#")[0].strip() for line in _REQUIREMENTS_FILE.read_text(encoding="utf-8").splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {requirement.name: requirement.specifier for requirement in requirements}


def installed_versions() -> dict[str, str]:
    """Returns the installed versions of TensorFlow and Keras; imports neither. A missing library is left out."""
    versions = {}
    for name in _CHECKED:
        for distribution in _DISTRIBUTIONS[name]:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def check_versions(installed: Mapping[str, str] | None = None, *, stacklevel: int = 2) -> None:
    """Warns for each of TensorFlow and Keras whose version is outside the tested range.

    A pre-release counts as its release: 2.21.0rc1 and 2.21.0.dev20260101 are inside `>=2.21,<2.22`.

    Args:
        installed: Versions by distribution name; by default, those installed here.
        stacklevel: As in `warnings.warn`, counted from this function: 1 names this function.

    >>> import warnings
    >>> from tfdist.versions import check_versions
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     check_versions({"tensorflow": "2.19.0", "keras": "3.15.1"})
    >>> print(str(caught[0].message).partition(" tfdist uses")[0])
    tfdist is not tested with this version of tensorflow. Received: tensorflow 2.19.0. Expected: tensorflow>=2.21,<2.22.
    """
    tested = tested_ranges()
    for name, version in (installed_versions() if installed is None else installed).items():
        # base_version drops .dev, rc and +local: the internals of 2.21.0rc1 are those of 2.21, not of 2.20.
        if name in _CHECKED and Version(version).base_version not in tested[name]:
            expected = f"{name}{','.join(sorted(map(str, tested[name]), reverse=True))}"
            warnings.warn(
                f"tfdist is not tested with this version of {name}. Received: {name} {version}. "
                f"Expected: {expected}. tfdist uses internals of {name} that may have changed: training "
                "may stop with an error that names a missing symbol. Run "
                f'`pip install "{expected}"`, or install a version of tfdist for {name} {version}.',
                UntestedVersionWarning,
                stacklevel=stacklevel,
            )
