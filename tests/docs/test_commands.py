"""Commands in the documentation exist: options of `tfdist`, targets of `make`, and scripts of this repository."""

import contextlib
import io
import re
from functools import cache
from pathlib import Path

import pytest

from tfdist.launch.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
# A command ends at the end of its line or code, at its script, or at a comment.
COMMAND = re.compile(r"tfdist (run|plan|doctor|checkpoints)\b([^`\n#]*?)(?=[`\n#]| [\w/.]+\.py| -m |$)", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
TARGET = re.compile(r"(?:`|^|&& )make (?:PYTHON=\S+ )?([a-z][a-z-]*)", re.MULTILINE)
SCRIPT = re.compile(r"\b(?:examples|benchmarks)/[\w/]+\.py\b")


@cache
def options(command: str) -> frozenset[str]:
    """The options that a command shows in its help."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main([command, "--help"]) == 0
    return frozenset(OPTION.findall(shown.getvalue()))


@cache
def targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def mistakes(text: str) -> list[str]:
    """The options, targets and scripts of a text that do not exist."""
    used = {(command, option) for command, rest in COMMAND.findall(text) for option in OPTION.findall(rest)}
    found = [f"tfdist {command} {option}" for command, option in used if option not in options(command)]
    found += [f"make {target}" for target in TARGET.findall(text) if target not in targets()]
    return found + [script for script in SCRIPT.findall(text) if not (ROOT / script).is_file()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    assert not mistakes(path.read_text(encoding="utf-8"))


def test_commands_are_found() -> None:
    commands = [command for path in FILES for command in COMMAND.findall(path.read_text(encoding="utf-8"))]
    assert len(commands) > 30 and {name for name, _ in commands} == {"run", "plan", "doctor", "checkpoints"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`tfdist run --worker 2 train.py`", ["tfdist run --worker"]),
        ("```\ntfdist run --workers 2 train.py --epochs 3\n```", []),
        ("tfdist doctor --workers 2  # --no-option", []),
        ("`tfdist checkpoints DIR --verfy`", ["tfdist checkpoints --verfy"]),
        ("`make demos` and `make demo`, we make docs", ["make demos"]),
        ("`python benchmarks/gone.py`, [a](../examples/digits.py)", ["benchmarks/gone.py"]),
    ],
)
def test_wrong_commands_are_found(text: str, found: list[str]) -> None:
    assert mistakes(text) == found
