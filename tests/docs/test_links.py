"""Links in Markdown lead somewhere, on a forge that shows the files as on the site: to a file, and to a heading."""

import re
import unicodedata
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor of a heading, as forges and Python-Markdown make it where both agree."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


@cache
def anchors(path: Path) -> set[str]:
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def broken(text: str, folder: Path, own: Path) -> list[str]:
    """The links of a text that lead nowhere."""
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
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken(path.read_text(encoding="utf-8"), path.parent, path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_page_has_one_title(path: Path) -> None:
    titles = re.findall(r"^# .+$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    assert len(titles) == 1, f"A page is one concept: {titles}. Make the others headings of the second level."


def test_what_is_broken_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Title\n\n## A heading, of `two` words\n")
    own = tmp_path / "page.md"
    text = "[a](page.md) [b](gone.md) [c](#a-heading-of-two-words) [d](page.md#gone) [e](/page.md) [f](https://x.org)"
    assert [found.split(":")[0] for found in broken(text, tmp_path, own)] == ["gone.md", "page.md#gone", "/page.md"]
