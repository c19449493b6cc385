"""A line at the bottom of a terminal that is painted over and over while other lines pass above it."""

import os
from collections.abc import Mapping

_ERASE = "\r\x1b[K"
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_REPAINT_SECONDS = 0.2
_LEAST_COLUMNS = 20  # in less there is room for nothing that helps
_ASCII = str.maketrans({"·": "|", "…": "~"})


class LiveLine:
    r"""The line, as what is to be written to show it. It never fills its row, so that no terminal begins another one.

    Args:
        terminal: File descriptor of the terminal, whose width is looked up whenever something is painted.
        has_style: Whether it is dimmed.
        is_ascii: Whether the terminal shows no other characters.

    >>> reader, writer = os.pipe()  # no terminal: 80 columns
    >>> line = LiveLine(writer, has_style=False, is_ascii=False)
    >>> line.painted("2 workers", now=0.0)
    '\r\x1b[K2 workers'
    >>> line.around("[0] hello\n")
    '\r\x1b[K[0] hello\n2 workers'
    >>> os.close(reader), os.close(writer)
    (None, None)
    """

    def __init__(self, terminal: int, *, has_style: bool, is_ascii: bool) -> None:
        self._terminal, self._has_style, self._is_ascii = terminal, has_style, is_ascii
        self._text = self._painted = ""
        self._painted_at = -_REPAINT_SECONDS

    @classmethod
    def on(cls, fd: int, environ: Mapping[str, str], encoding: str) -> "LiveLine | None":
        """Returns the line of a terminal that can repaint one, or None for any other file.

        Args:
            fd: Where it would be written.
            environ: The environment: TERM and NO_COLOR count.
            encoding: What the terminal reads.
        """
        if not os.isatty(fd) or environ.get("TERM", "dumb") in ("", "dumb"):
            return None
        is_ascii = encoding.lower().replace("-", "") != "utf8"
        return cls(fd, has_style=not environ.get("NO_COLOR"), is_ascii=is_ascii)

    def is_on(self, fd: int) -> bool:
        """Whether what is written there appears on the same terminal."""
        return os.isatty(fd) and os.fstat(fd).st_rdev == os.fstat(self._terminal).st_rdev

    def around(self, lines: str) -> str:
        """Returns `lines`, which end with a newline, with the line wiped out before and painted again below them."""
        self._painted = self._fitted()
        # Wiped out also where this process has painted none: the process that it was forked from may have.
        return f"{_ERASE}{lines}{self._painted}"

    def painted(self, text: str, *, now: float) -> str:
        """Returns what shows `text` in the line, or nothing where that stands there already or was painted just now.

        Args:
            text: The line; an empty one wipes it out.
            now: Monotonic time in seconds.
        """
        self._text = text
        fitted = self._fitted()
        if fitted == self._painted or (text and now - self._painted_at < _REPAINT_SECONDS):
            return ""
        self._painted, self._painted_at = fitted, now
        return f"{_ERASE}{fitted}"

    def _fitted(self) -> str:
        try:
            columns = os.get_terminal_size(self._terminal).columns or 80
        except OSError:
            columns = 80
        if not self._text or columns < _LEAST_COLUMNS:
            return ""
        text = self._text if len(self._text) < columns else self._text[: columns - 2] + "…"
        text = text.translate(_ASCII) if self._is_ascii else text
        return f"{_DIM}{text}{_RESET}" if self._has_style else text
