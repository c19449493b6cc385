"""Commands of pages exist: options of `tfdist`, targets of `make`, and scripts of this repository."""

import contextlib
import io
import re
from collections.abc import Iterator
from functools import cache

from page_files import Finding, Pages, line_at

from tfdist.launch.cli.main import main

# A command ends at the end of its line or code, at its script, or at a comment.
COMMAND = re.compile(r"tfdist (run|plan|doctor|checkpoints)\b([^`\n#]*?)(?=[`\n#]| [\w/.]+\.py| -m |$)", re.MULTILINE)
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_MAKE = re.compile(r"(?:`|^|&& )make (?:PYTHON=\S+ )?([a-z][a-z-]*)", re.MULTILINE)
_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
_SCRIPT = re.compile(r"\b(?:examples|benchmarks)/[\w/]+\.py\b")


def commands(pages: Pages) -> Iterator[Finding]:
    """Options, targets and scripts that do not exist."""
    targets = _TARGET.findall(pages.texts.get("Makefile", ""))
    for path, text in pages.markdown.items():
        for match in COMMAND.finditer(text):
            for option in sorted(set(_OPTION.findall(match[2])) - _options(match[1])):
                yield Finding(path, line_at(text, match.start()), f"tfdist {match[1]} {option}: no such option")
        for match in _MAKE.finditer(text):
            if match[1] not in targets:
                yield Finding(path, line_at(text, match.start(1)), f"make {match[1]}: no such target")
        for match in _SCRIPT.finditer(text):
            if not (pages.root / match[0]).is_file():
                yield Finding(path, line_at(text, match.start()), f"{match[0]}: no such script")


@cache
def _options(command: str) -> frozenset[str]:
    """The options that a command shows in its help."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        main([command, "--help"])
    return frozenset(_OPTION.findall(shown.getvalue()))
