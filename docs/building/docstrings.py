"""Converts docstrings to Markdown: examples (`>>> ...`) become code blocks, names of pages become links.

Griffe, which reads the sources for mkdocstrings, loads the extension below.
"""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^|(?<=\n))(?P<indent>[ ]*)>>> .*(?:\n(?!\s*\n).*)*")
_FENCED = re.compile(r"(^[ ]*```.*?^[ ]*```)", re.MULTILINE | re.DOTALL)
_PAGE = re.compile(r"`docs/(\w+)\.md`")


def as_markdown(text: str) -> str:
    r"""A docstring with its examples in code blocks.

    >>> as_markdown("Adds.\n\n>>> 1 + 1\n2")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """

    def block(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0]}\n{indent}```"

    parts = _FENCED.split(text)  # every second part is already a block
    parts[::2] = (_PAGE.sub(r"[\1](../\1.md)", _EXAMPLE.sub(block, part)) for part in parts[::2])
    return "".join(parts)


class MarkdownDocstrings(griffe.Extension):
    """Converts each docstring after it has been read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Griffe calls this for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
