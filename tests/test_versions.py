"""The tested ranges are stated once, and a version outside them is a warning that says what to do."""

import configparser
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tfdist import versions
from tfdist.versions import UntestedVersionWarning, check_versions, installed_versions, tested_ranges

ROOT = Path(__file__).resolve().parents[1]
INSIDE = {"tensorflow": "2.21.0", "keras": "3.15.1"}


def warnings_of(installed: dict[str, str]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_versions(installed)
    return caught


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tensorflow": "2.21.0rc1"},
        {"tensorflow": "2.21.1"},
        {"tensorflow": "2.21.0.dev20260101"},
        {"tensorflow": "2.21.0+nv25.1"},
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
        ("tensorflow", "2.20.0"),
        ("tensorflow", "2.22.0"),
        ("tensorflow", "2.22.0.dev20260101"),
        ("tensorflow", "2.22.0rc0"),
        ("tensorflow", "3.0.0"),
        ("keras", "2.15.0"),
        ("keras", "3.14.2"),
        ("keras", "3.16.0rc1"),
    ],
)
def test_outside_the_range_warns(name: str, version: str) -> None:
    (warning,) = warnings_of({**INSIDE, name: version})
    message = str(warning.message)
    assert warning.category is UntestedVersionWarning
    assert f"Received: {name} {version}." in message
    lower, upper = {"tensorflow": ("2.21", "2.22"), "keras": ("3.15", "3.16")}[name]
    assert f"Expected: {name}>={lower},<{upper}." in message
    assert f'`pip install "{name}>={lower},<{upper}"`' in message


def test_the_warning_points_at_the_caller() -> None:
    (warning,) = warnings_of({"keras": "2.0"})
    assert warning.filename == __file__


def test_both_outside_are_two_warnings() -> None:
    assert len(warnings_of({"tensorflow": "2.0.0", "keras": "2.0.0"})) == 2


def test_installed_versions_are_inside_and_found_without_importing() -> None:
    assert set(installed_versions()) == {"tensorflow", "keras"}
    assert not warnings_of(installed_versions())
    program = "import sys, tfdist.versions as v; v.check_versions(); print({'tensorflow', 'keras'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "set()" and not printed.stderr


def test_nightly_distributions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "tf-nightly":
            return "2.22.0.dev20260101"
        raise versions.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.importlib.metadata, "version", version)
    assert installed_versions() == {"tensorflow": "2.22.0.dev20260101"}


def test_the_ranges_are_stated_once() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options"]["install_requires"] == "file: tfdist/requirements.txt"
    assert all({specifier.operator for specifier in tested_ranges()[name]} == {">=", "<"} for name in INSIDE)
