"""The files that the checks of pages read, and what the checks report."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SOURCES = ("tfdist", "strategies", "callbacks")
PROGRAMS = ("examples", "benchmarks")


class Finding(NamedTuple):
    """Something wrong in a line of a file."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Pages:
    """The pages of a repository and the files that they describe, by their paths in it."""

    root: Path

    @cached_property
    def markdown(self) -> dict[str, str]:
        """The text of each page."""
        files = [*self.root.glob("*.md"), *(self.root / "docs").rglob("*.md"), *(self.root / "examples").rglob("*.md")]
        return self._read(files)

    @cached_property
    def sources(self) -> dict[str, str]:
        """The text of each module of tfdist."""
        # From Python 3.13 rglob follows the links to strategies/ and callbacks/, which are read themselves.
        files = [file for top in SOURCES for file in (self.root / top).rglob("*.py")]
        return self._read(file for file in files if not any(parent.is_symlink() for parent in file.parents))

    @cached_property
    def texts(self) -> dict[str, str]:
        """Every text of the product: pages, notebooks and sources."""
        found = {**self.markdown, **self.sources}
        for notebook in sorted((self.root / "examples").rglob("*.ipynb")):
            cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
            found[self._name(notebook)] = "\n".join("".join(cell["source"]) for cell in cells)
        found |= self._read(file for top in PROGRAMS for file in (self.root / top).rglob("*.py"))
        return found | self._read(file for name in ("mkdocs.yml", "Makefile") if (file := self.root / name).is_file())

    def _read(self, files: Iterable[Path]) -> dict[str, str]:
        return {self._name(file): file.read_text(encoding="utf-8") for file in sorted(files)}

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def line_at(text: str, position: int) -> int:
    r"""The number of the line with a position of a text.

    >>> line_at("one\ntwo", 4)
    2
    """
    return text.count("\n", 0, position) + 1


def without_code(text: str) -> str:
    r"""A page with empty lines in place of its blocks of code.

    >>> without_code("a\n```\nb\n```\nc")
    'a\n\n\n\nc'
    """
    return _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
