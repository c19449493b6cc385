"""Inserts the output of commands into a page: `<!-- tfdist run --help -->` becomes that command's output.

MkDocs calls `on_page_markdown`.
"""

import contextlib
import io
import os
import re
from typing import Any

from tfdist.launch.cli.main import main

_COMMAND = re.compile(r"^<!-- (tfdist [^>]*--help) -->$", re.MULTILINE)
_COLUMNS = "100"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Runs the commands of a page."""
    return _COMMAND.sub(lambda match: f"```text\n{output_of(match[1])}\n```", markdown)


def output_of(command: str) -> str:
    """Returns the output of a command.

    Raises:
        ValueError: the command fails.
    """
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=_COLUMNS, NO_COLOR="1")
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            code = main(command.split()[1:])
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    if code:
        raise ValueError(f"`{command}` fails. Received: {shown.getvalue()}. Correct the page.")
    return shown.getvalue().strip()
