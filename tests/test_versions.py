"""The tested ranges are stated once; an older version is refused, a newer one is a warning that says what to do."""

import configparser
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tfdist import versions
from tfdist.versions import (
    UnsupportedVersionError,
    UntestedVersionWarning,
    check_versions,
    installed_versions,
    oldest_supported,
    require_supported_versions,
    tested_ranges,
)

ROOT = Path(__file__).resolve().parents[1]
INSIDE = {"tensorflow": "2.21.0", "keras": "3.15.1"}
RANGES = {"tensorflow": ("2.18", "2.23"), "keras": ("3.10", "3.16")}


def warnings_of(installed: dict[str, str]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        untested = check_versions(installed)
    assert len(untested) == len(caught)
    return caught


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tensorflow": "2.18.0"},
        {"tensorflow": "2.18.0rc1"},
        {"tensorflow": "2.22.0rc0"},
        {"tensorflow": "2.21.0.dev20260101"},
        {"tensorflow": "2.21.0+nv25.1"},
        {"keras": "3.10.0"},
        {"keras": "3.15.0.dev2026010203"},
        {"keras": "3.15.99"},
        {"numpy": "0.1"},
    ],
)
def test_inside_the_range_is_silent(changed: dict[str, str]) -> None:
    assert not warnings_of({**INSIDE, **changed})


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("tensorflow", "2.23.0"),
        ("tensorflow", "2.23.0.dev20260101"),
        ("tensorflow", "3.0.0"),
        ("keras", "3.16.0rc1"),
        ("keras", "4.0"),
    ],
)
def test_newer_than_the_range_warns(name: str, version: str) -> None:
    (warning,) = warnings_of({**INSIDE, name: version})
    message = str(warning.message)
    assert warning.category is UntestedVersionWarning
    assert f"Received: {name} {version}." in message
    lower, upper = RANGES[name]
    assert f"Expected: {name}>={lower},<{upper}." in message
    assert f'`pip install "{name}>={lower},<{upper}"`' in message


@pytest.mark.parametrize("check", [check_versions, require_supported_versions])
@pytest.mark.parametrize(
    ("name", "version"),
    [("tensorflow", "2.17.1"), ("tensorflow", "1.15.0"), ("keras", "3.9.2"), ("keras", "2.15.0"), ("keras", "3.8rc1")],
)
def test_older_than_the_range_is_an_error(check, name: str, version: str) -> None:
    lower, _ = RANGES[name]
    with pytest.raises(UnsupportedVersionError, match=f"version of {name}. Received: {name} {version}") as raised:
        check({**INSIDE, name: version})
    assert f'Expected: {name}>={lower}. Run `pip install --upgrade "{name}>={lower}"`.' in str(raised.value)


def test_the_warning_points_at_the_caller() -> None:
    (warning,) = warnings_of({"tensorflow": "9.0", "keras": "3.15.1"})
    assert warning.filename == __file__


def test_both_newer_are_two_warnings() -> None:
    assert len(warnings_of({"tensorflow": "9.0.0", "keras": "9.0.0"})) == 2


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_installed_versions_are_supported_and_found_without_importing() -> None:
    assert set(installed_versions()) == {"tensorflow", "keras"}
    require_supported_versions()
    program = "import sys, tfdist.versions as v; v.check_versions(); print({'tensorflow', 'keras'} & set(sys.modules))"
    assert run(program).stdout.strip() == "set()"


def test_nightly_distributions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "tf-nightly":
            return "2.22.0.dev20260101"
        raise versions.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.importlib.metadata, "version", version)
    assert installed_versions() == {"tensorflow": "2.22.0.dev20260101"}


def test_a_missing_tensorflow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_versions", lambda: {"keras": "3.15.1"})
    require_supported_versions()  # a build under another name, of unknown version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedVersionError, match=r"not installed.*pip install 'tfdist\[tensorflow\]'`, .*cuda"):
        require_supported_versions()


@pytest.mark.parametrize("package", ["tfdist.strategies", "tfdist.callbacks"])
def test_importing_with_an_old_version_names_it(package: str) -> None:
    old = "import tfdist.versions as v; v.installed_versions = lambda: {'tensorflow': '2.17.1', 'keras': '3.15.1'}"
    finished = run(f"{old}\nimport {package}")
    assert finished.returncode != 0
    assert finished.stderr.splitlines()[-1].startswith("tfdist.versions.UnsupportedVersionError: tfdist does not")
    assert "Received: tensorflow 2.17.1." in finished.stderr


def test_the_ranges_of_the_installation_are_the_tested_ones() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options"]["install_requires"] == "file: tfdist/requirements.txt"
    assert all({specifier.operator for specifier in tested_ranges()[name]} == {">=", "<"} for name in INSIDE)
    for name, (lower, upper) in RANGES.items():
        assert str(oldest_supported(name)) == f">={lower}"
        assert f"<{upper}" in str(tested_ranges()[name])
    # The versions that `make test` uses are among them.
    test = [Requirement(line) for line in config["options.extras_require"]["test"].split() if line[:1].isalpha()]
    for need in (need for need in test if need.name in RANGES):
        (oldest,) = (bound.version for bound in need.specifier if bound.operator == ">=")
        assert oldest in tested_ranges()[need.name]
