"""Pages use the terms of the glossary, and no text of the product uses the phrases below."""

import re
from collections.abc import Iterator

from page_files import Finding, Pages, line_at

_GLOSSARY = "docs/glossary.md"
TERM = re.compile(r"^\| \*\*(.+?)\*\* \|", re.MULTILINE)

# Odd or ambiguous phrases, and what the texts say instead.
_PHRASES = {
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
_GAP = r"""(?:[\s#"']|f(?="))+"""
_FORBIDDEN = re.compile(rf"\b(?:{'|'.join(_PHRASES)})\b".replace(" ", _GAP), re.IGNORECASE)


def terms(pages: Pages) -> Iterator[Finding]:
    """Terms of the glossary that no other page uses, or that have two rows."""
    glossary = pages.markdown.get(_GLOSSARY, "")
    others = "\n".join(text for path, text in pages.markdown.items() if path != _GLOSSARY)
    seen: set[str] = set()
    for match in TERM.finditer(glossary):
        line = line_at(glossary, match.start())
        if match[1] in seen:
            yield Finding(_GLOSSARY, line, f"second row of {match[1]!r}")
        elif not is_used(match[1], others):
            yield Finding(_GLOSSARY, line, f"no page uses {match[1]!r}")
        seen.add(match[1])


def phrases(pages: Pages) -> Iterator[Finding]:
    """Phrases that texts avoid."""
    for path, text in pages.texts.items():
        for match in _FORBIDDEN.finditer(text):
            phrase = re.sub(_GAP, " ", match[0])
            instead = next(words for odd, words in _PHRASES.items() if re.search(rf"\b(?:{odd})\b", phrase, re.I))
            yield Finding(path, line_at(text, match.start()), f"{phrase!r}. Expected: {instead}")


def is_used(term: str, text: str) -> bool:
    """Whether a text uses a term, also in the plural, or as a past or present tense.

    >>> is_used("resume", "It is resumed."), is_used("stall", "Two stalls"), is_used("round", "around, ground")
    (True, True, False)
    """
    stem = re.escape(term.removesuffix("e"))
    return bool(re.search(rf"\b{stem}(?:|e|es|s|ed|ing|d)\b", text, re.IGNORECASE))
