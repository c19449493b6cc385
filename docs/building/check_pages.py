"""Checks the pages against the program: links, commands, code, names, messages, words and pictures.

    python docs/building/check_pages.py    prints every finding as `file:line: text`; exits with 1 if there is one

`make lint` runs it.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from check_code_blocks import code_blocks, converted_program
from check_commands import commands
from check_exports import exports
from check_links import links, named_files, titles
from check_messages import rows_of_messages
from check_pictures import pictures
from check_words import phrases, terms
from page_files import Finding, Pages

ROOT = Path(__file__).resolve().parents[2]

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
