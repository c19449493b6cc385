"""The documentation uses the terms of `docs/glossary.md`, and no text of the product uses the phrases below."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
TERM = re.compile(r"^\| \*\*(.+?)\*\* \|", re.MULTILINE)

# Odd or ambiguous phrases, and what the texts say instead.
PHRASES = {
    r"anew": "again",
    r"heed(?:s|ed)?": "consider, follow, respect",
    r"(?:tell|tells|told|telling) of": "report",
    r"of (?:its|their|his|our|one's|your) own": "separate, custom",
    r"to be had": "available",
    r"(?<!there\s)is no (?:message|number|size|time|mode|compressor|method|name|script|module|list|step)": "is not a",
    r"(?:go|goes|went|going) on": "continue, resume",
    r"stands? still|stood still": "stalls",
    r"gets? on|getting on": "progresses",
    r"in vain": "without success",
    r"for ever": "forever, indefinitely",
    r"takes a while": "takes long",
    r"kept back": "held, delayed",
    r"whose it is": "of which it is",
    r"(?:come|comes|came) up": "start",
    r"knows? of": "know",
    r"what stands": "what is",
    r"bit by bit as if": "bit-identical",
    r"whole checkpoints?": "complete checkpoint",
    r"travels?|travelled": "is sent",
    r"as ever": "unchanged, as before",
    r"puts? back|comes? back|came back": "restore, return",
    r"hears?|told": "receive, report",
    r"crew|roster|tally|settlements?": "worker group, membership, statistics, decision",
}
# Words may be separated by a line break, the sign of a comment, or the end of one string and the start of the next.
GAP = r"""(?:[\s#"']|f(?="))+"""
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b".replace(" ", GAP), re.IGNORECASE)


def texts() -> Iterator[tuple[str, str]]:
    """The path and the text of every page, notebook and source file of the product."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    for notebook in (ROOT / "examples").rglob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        yield str(notebook.relative_to(ROOT)), "\n".join("".join(cell["source"]) for cell in cells)
    for top in ("tfdist", "strategies", "callbacks", "examples", "benchmarks"):
        for source in (ROOT / top).rglob("*.py"):
            # Before Python 3.13 rglob does not follow the links to strategies/ and callbacks/.
            yield str(source.relative_to(ROOT)), source.read_text(encoding="utf-8")
    yield "mkdocs.yml", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    yield "Makefile", (ROOT / "Makefile").read_text(encoding="utf-8")


def forbidden(text: str) -> list[tuple[int, str]]:
    """The forbidden phrases of a text with their lines."""
    return [(text.count("\n", 0, match.start()) + 1, re.sub(GAP, " ", match[0])) for match in FORBIDDEN.finditer(text)]


def used(term: str, text: str) -> bool:
    """Whether a text uses a term, also in the plural, or as a past or present tense."""
    stem = re.escape(term.removesuffix("e"))
    return bool(re.search(rf"\b{stem}(?:|e|es|s|ed|ing|d)\b", text, re.IGNORECASE))


TERMS = TERM.findall(GLOSSARY.read_text(encoding="utf-8"))
TEXTS = dict(texts())


def test_every_term_of_the_glossary_is_used() -> None:
    pages = "\n".join(text for path, text in TEXTS.items() if path.endswith(".md") and path != "docs/glossary.md")
    assert len(TERMS) > 50 and len(set(TERMS)) == len(TERMS)
    assert [term for term in TERMS if not used(term, pages)] == []


@pytest.mark.parametrize("path", sorted(TEXTS))
def test_text_has_no_forbidden_phrase(path: str) -> None:
    assert forbidden(TEXTS[path]) == [], {phrase: instead for phrase, instead in PHRASES.items()}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It begins anew.", [(1, "anew")]),
        ("One.\n# Two tells\n# of three.", [(2, "tells of")]),
        ('f"This is "\n    f"no compressor"', [(1, "is no compressor")]),
        ("There is no message. It is no longer used. The whole batch. `going_on`", []),
        ("Training goes\non.", [(1, "goes on")]),
        ("a stall; the tall crews", []),
    ],
)
def test_forbidden_phrases_are_found(text: str, found: list[tuple[int, str]]) -> None:
    assert forbidden(text) == found


def test_forms_of_a_term_are_recognised() -> None:
    assert used("resume", "It is resumed.") and used("stall", "Two stalls") and used("replica", "replicas")
    assert not used("round", "around, ground") and not used("part", "partly")
