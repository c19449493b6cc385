"""Checks the pages against the program: links, commands, code, names, messages, words and pictures.

    python docs/building/check_pages.py    prints every finding as `file:line: text`; exits with 1 if there is one

`make lint` runs it.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from check_code_blocks import code_blocks, converted_program
from check_commands import commands
from check_links import links, named_files, titles
from check_messages import rows_of_messages
from check_words import phrases, terms
from page_files import Finding, Pages, line_at
from pictures import PICTURES

ROOT = Path(__file__).resolve().parents[2]
MODULES = tuple(
    f"tfdist.{name}"
    for name in (
        "callbacks checkpoint cluster collectives compression data launch parameter_server recovery "
        "spark strategies training"
    ).split()
)
# On the pages without an export: the entry point of the command, and the base class whose members both mirrored
# strategies have.
_NOT_EXPORTED = {"tfdist.launch.cli.main.main", "tfdist.strategies.replicated_strategy.ReplicatedStrategy"}
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
_API_PAGES = "docs/api/"
_PICTURES = "docs/images"


def exports(pages: Pages) -> Iterator[Finding]:
    """Exports that no page shows, and names on the pages that no module exports."""
    exported = {f"{name}.{export}" for name in MODULES for export in importlib.import_module(name).__all__}
    shown = set()
    for path, text in pages.markdown.items():
        for match in _DIRECTIVE.finditer(text if path.startswith(_API_PAGES) else ""):
            shown.add(match[1])
            if match[1] not in {*exported, *_NOT_EXPORTED, *MODULES}:  # pages also show docstrings of modules
                yield Finding(path, line_at(text, match.start()), f"no module exports {match[1]}")
    for name in sorted((exported | _NOT_EXPORTED) - shown):
        yield Finding(_API_PAGES, 1, f"no page shows {name}. Expected: a line `::: {name}`, or no export")


def pictures(pages: Pages) -> Iterator[Finding]:
    """Pictures that differ from what is drawn now, that nothing draws, or with elements beyond their borders."""
    folder = pages.root / _PICTURES
    for name, draw in PICTURES.items():
        file = folder / f"{name}.svg"
        if not file.is_file() or file.read_text(encoding="utf-8") != draw().svg():
            yield Finding(f"{_PICTURES}/{file.name}", 1, "differs. Run: python docs/building/pictures.py")
    for file in sorted(folder.glob("*.svg")):
        if file.stem not in PICTURES:
            yield Finding(f"{_PICTURES}/{file.name}", 1, "docs/building/pictures.py does not draw it")
        for element in _outside(file):
            yield Finding(f"{_PICTURES}/{file.name}", 1, f"lies outside of the picture: {element}")


def _outside(file: Path) -> Iterator[dict[str, str]]:
    root = ElementTree.parse(file).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for element in root.iter():
        if "x" in element.attrib:
            x, y = float(element.attrib["x"]), float(element.attrib["y"])
            right, bottom = x + float(element.get("width", 0)), y + float(element.get("height", 0))
            if not (0 <= x <= right <= width and 0 <= y <= bottom <= height):
                yield dict(element.attrib)


RULES: dict[str, Callable[[Pages], Iterator[Finding]]] = {
    rule.__name__: rule
    for rule in (
        links,
        named_files,
        titles,
        commands,
        code_blocks,
        converted_program,
        exports,
        rows_of_messages,
        terms,
        phrases,
        pictures,
    )
}


def findings(pages: Pages) -> list[Finding]:
    """Everything that breaks a rule, by file and line."""
    return sorted(finding for rule in RULES.values() for finding in rule(pages))


def main() -> int:
    """Prints the findings; returns the exit code."""
    found = findings(Pages(ROOT))
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    sys.stdout.write(f"{len(found)} findings in pages\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
