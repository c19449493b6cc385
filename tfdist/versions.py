"""The TensorFlow and Keras versions that tfdist supports and is tested with.

pip does not keep other versions out: it must not replace an installed TensorFlow, and upper bounds would make
installations fail when a new version appears. So `require_supported_versions` runs when tfdist's packages are imported,
and `check_versions` when a strategy is created.
"""

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

_REQUIREMENTS_FILE = Path(__file__).with_name("requirements.txt")
# The lower bounds are those of requirements.txt and setup.cfg: older versions are refused. Newer ones are untested.
_TESTED = {"tensorflow": SpecifierSet(">=2.18,<2.23"), "keras": SpecifierSet(">=3.10,<3.16")}
# Names of distributions that contain the same modules.
_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "tensorflow-rocm"),
    "keras": ("keras", "keras-nightly"),
}


class UntestedVersionWarning(UserWarning):
    """The installed version of TensorFlow or Keras is newer than those that tfdist is tested with."""


class UnsupportedVersionError(ImportError):
    """TensorFlow or Keras is not installed, or older than the versions that tfdist supports."""


def tested_ranges() -> dict[str, SpecifierSet]:
    """Returns the tested range of every dependency, by name.

    >>> from tfdist.versions import tested_ranges
    >>> "2.18.1" in tested_ranges()["tensorflow"]
    True
    >>> "2.17.1" in tested_ranges()["tensorflow"]
    False
    """
    lines = (line.partition("#")[0].strip() for line in _REQUIREMENTS_FILE.read_text(encoding="utf-8").splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return _TESTED | {need.name: need.specifier for need in requirements if need.name not in _TESTED}


def oldest_supported(name: str) -> SpecifierSet:
    """Returns the lower bound of `"tensorflow"` or `"keras"`.

    >>> str(oldest_supported("keras"))
    '>=3.10'
    """
    return SpecifierSet(",".join(str(bound) for bound in _TESTED[name] if bound.operator == ">="))


def installed_versions() -> dict[str, str]:
    """Returns the installed versions of TensorFlow and Keras; imports neither. A missing library is left out."""
    versions = {}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                versions[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def is_within(version: str, bounds: SpecifierSet) -> bool:
    """Whether a version is within bounds. A pre-release counts as its release.

    >>> is_within("2.22.0rc0", SpecifierSet(">=2.18,<2.22")), is_within("2.18.0.dev1", SpecifierSet(">=2.18,<2.22"))
    (False, True)
    """
    try:
        # base_version drops .dev, rc and +local: the internals of 2.21.0rc1 are those of 2.21, not of 2.20.
        return Version(version).base_version in bounds
    except InvalidVersion:
        return False


def require_supported_versions(installed: Mapping[str, str] | None = None) -> None:
    """Checks that TensorFlow and Keras are installed, and not too old; imports neither.

    Args:
        installed: Versions by name; by default, those installed here.

    Raises:
        UnsupportedVersionError: If one of them is missing or older than the oldest supported version.

    >>> require_supported_versions({"tensorflow": "2.18.1", "keras": "3.9.2"})
    Traceback (most recent call last):
    tfdist.versions.UnsupportedVersionError: tfdist does not support ... Received: keras 3.9.2. Expected: keras>=3.10...
    """
    known = installed_versions() if installed is None else installed
    for name in _TESTED:
        oldest = oldest_supported(name)
        # A build under another name has no known version, but has the module.
        if name not in known and (installed is not None or importlib.util.find_spec(name) is None):
            hint = ", `tfdist[cpu]` or `tfdist[cuda]`" if name == "tensorflow" else ""
            raise UnsupportedVersionError(
                f"{name} is not installed. Received: no {name}. Expected: {name}{oldest}. Run "
                f"`pip install 'tfdist[tensorflow]'`{hint}: tfdist does not install TensorFlow unless it is asked to."
            )
        if name in known and not is_within(known[name], oldest):
            raise UnsupportedVersionError(
                f"tfdist does not support this version of {name}. Received: {name} {known[name]}. Expected: "
                f'{name}{oldest}. Run `pip install --upgrade "{name}{oldest}"`.'
            )


def check_versions(installed: Mapping[str, str] | None = None, *, stacklevel: int = 2) -> list[str]:
    """Warns for each of TensorFlow and Keras whose version is newer than the tested range.

    Args:
        installed: Versions by name; by default, those installed here.
        stacklevel: As in `warnings.warn`, counted from this function: 1 names this function.

    Returns:
        The names of the libraries that it warned of.

    Raises:
        UnsupportedVersionError: If one of them is missing or too old.

    >>> import warnings
    >>> from tfdist.versions import check_versions
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     check_versions({"tensorflow": "2.30.0", "keras": "3.15.1"})
    ['tensorflow']
    >>> print(str(caught[0].message).partition(" tfdist uses")[0])
    tfdist is not tested with this version of tensorflow. Received: tensorflow 2.30.0. Expected: tensorflow>=2.18,<2.23.
    """
    known = installed_versions() if installed is None else installed
    require_supported_versions(installed)
    untested = [name for name in _TESTED if name in known and not is_within(known[name], _TESTED[name])]
    for name in untested:
        expected = f"{name}{','.join(sorted(map(str, _TESTED[name]), reverse=True))}"
        warnings.warn(
            f"tfdist is not tested with this version of {name}. Received: {name} {known[name]}. Expected: {expected}. "
            f"tfdist uses internals of {name} that may have changed: training may stop with an error that names a "
            f'missing symbol. Run `pip install "{expected}"`, or install a newer tfdist.',
            UntestedVersionWarning,
            stacklevel=stacklevel,
        )
    return untested
