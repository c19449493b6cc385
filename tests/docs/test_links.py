"""Links in Markdown files have a target, a file and a heading, on a forge as well as on the site."""

import re
import unicodedata
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
# A file of Python in backticks. The stars of `test_elastic*.py` stand for any characters.
FILE = re.compile(r"`([\w*./-]+\.py)`")
READERS_FILES = frozenset({"train.py", "script.py"})
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor of a heading, for headings where forges and Python-Markdown agree."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@cache
def anchors(path: Path) -> set[str]:
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def broken(text: str, folder: Path, own: Path) -> list[str]:
    """The links of a text without a target."""
    found = []
    for link in LINK.findall(FENCED.sub("", text)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name if name else own
        if link.startswith("/") or not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{link}: no such heading; there are {sorted(anchors(target))}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(path: Path) -> None:
    assert not broken(path.read_text(encoding="utf-8"), path.parent, path)


@cache
def sources() -> list[str]:
    tops = ("tfdist", "strategies", "callbacks", "tests", "examples", "benchmarks", "docs")
    return [f"/{file.relative_to(ROOT)}" for top in tops for file in (ROOT / top).rglob("*.py")]


def missing_files(text: str) -> list[str]:
    """The files of Python that a text names, by the end of their path, and that do not exist."""
    named = set(FILE.findall(FENCED.sub("", text))) - READERS_FILES
    return [name for name in named if not any(fnmatch(source, f"*/{name}") for source in sources())]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(path: Path) -> None:
    assert not missing_files(path.read_text(encoding="utf-8"))


def test_a_missing_file_is_found() -> None:
    text = "`train.py`, `checkpoint/shard.py`, `test_links.py`, `docs/test_l*s.py`, `checkpoint/stores.py`, `ks.py`"
    assert sorted(missing_files(text)) == ["checkpoint/stores.py", "ks.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_has_one_title(path: Path) -> None:
    titles = re.findall(r"^# .+$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    assert len(titles) == 1, f"A page has one title: {titles}. Use headings of the second level for the others."


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Title\n\n## A heading, of `two` words\n")
    own = tmp_path / "page.md"
    text = "[a](page.md) [b](gone.md) [c](#a-heading-of-two-words) [d](page.md#gone) [e](/page.md) [f](https://x.org)"
    assert [found.split(":")[0] for found in broken(text, tmp_path, own)] == ["gone.md", "page.md#gone", "/page.md"]
