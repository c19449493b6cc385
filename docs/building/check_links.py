"""Links of pages have a target, a file and a heading, on a forge as well as on the site."""

import re
import unicodedata
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from page_files import PROGRAMS, SOURCES, Finding, Pages, line_at, without_code

# A file of Python in backticks. The stars of `test_elastic*.py` stand for any characters.
_FILE = re.compile(r"`([\w*./-]+\.py)`")
_READERS_FILES = frozenset({"train.py", "script.py"})
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TITLE = re.compile(r"^# .+$", re.MULTILINE)


def links(pages: Pages) -> Iterator[Finding]:
    """Links without a file or a heading."""
    for path, text in pages.markdown.items():
        prose = without_code(text)
        for match in _LINK.finditer(prose):
            if mistake := _mistake(match[1], pages.root / path):
                yield Finding(path, line_at(prose, match.start()), f"{match[1]}: {mistake}")


def named_files(pages: Pages) -> Iterator[Finding]:
    """Files of Python that a page names, by the end of their path, and that do not exist."""
    tops = (*SOURCES, *PROGRAMS, "tests", "docs")
    files = [f"/{file.relative_to(pages.root)}" for top in tops for file in (pages.root / top).rglob("*.py")]
    for path, text in pages.markdown.items():
        prose = without_code(text)
        for match in _FILE.finditer(prose):
            if match[1] not in _READERS_FILES and not any(fnmatch(file, f"*/{match[1]}") for file in files):
                yield Finding(path, line_at(prose, match.start()), f"`{match[1]}`: no such file")


def titles(pages: Pages) -> Iterator[Finding]:
    """Pages with other than one title."""
    for path, text in pages.markdown.items():
        prose = without_code(text)
        first, *others = list(_TITLE.finditer(prose)) or [None]
        if first is None:
            yield Finding(path, 1, "no title. Expected: one heading of the first level")
        for match in others:
            yield Finding(path, line_at(prose, match.start()), f"second title {match[0]!r}. Expected: a lower level")


def slug(heading: str) -> str:
    """The anchor of a heading, for headings where forges and Python-Markdown agree.

    >>> slug("A heading, of `two` words")
    'a-heading-of-two-words'
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def _mistake(link: str, page: Path) -> str:
    if link.startswith(("https://", "http://", "mailto:")):
        return ""
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if link.startswith("/") or not target.exists():
        return "no such file"
    if not anchor or target.suffix != ".md":
        return ""
    anchors = {slug(heading) for heading in _HEADING.findall(without_code(target.read_text(encoding="utf-8")))}
    return "" if anchor in anchors else f"no such heading; there are {sorted(anchors)}"
