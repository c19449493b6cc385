"""Lines of a terminal: splits a worker's output into rendered lines, and paints the status line below them."""

import os
import re
from collections.abc import Mapping

_MAX_PENDING_CHARACTERS = 65_536
# Removes cursor movements and other controls, which would act on the launcher's terminal. Colours and tabs stay.
_CONTROLS = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # other sequences that begin with ESC [
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[ -/]*[0-Z\\^-~]?"
    r"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_ERASE_LINE = "\r\x1b[K"
_REPAINT_SECONDS = 0.2
_MIN_COLUMNS = 20  # a narrower terminal has no room for useful text
_ASCII = str.maketrans({"·": "|", "…": "~"})


def render(raw: str) -> str:
    r"""Returns what a terminal finally shows of a line.

    >>> render("1/3\r2/3\r3/3\r")
    '3/3'
    >>> render("100\b\b\b200")
    '200'
    """
    text = _CONTROLS.sub(lambda match: match["colour"] or "", raw)
    rewritten = "\r" in text
    text = next((version for version in reversed(text.split("\r")) if version), "")
    if "\b" in text:
        shown_characters: list[str] = []
        for character in text:
            if character != "\b":
                shown_characters.append(character)
            elif shown_characters:
                shown_characters.pop()
        text = "".join(shown_characters)
    if rewritten and not text.strip():
        return ""
    if "\x1b" in text and not text.endswith(_RESET):
        text += _RESET
    return text


class LineSplitter:
    r"""Splits a stream into lines as a terminal shows them.

    Args:
        interval_seconds: An unfinished line is shown after this time without a change. A line that is being rewritten,
            such as a progress bar, is shown at most once in this time.

    >>> lines = LineSplitter(interval_seconds=2.0)
    >>> lines.feed("epoch 1\n1/2\r", now=0.0)
    ['epoch 1']
    >>> lines.feed("2/2\ndone", now=1.0)
    ['2/2']
    >>> lines.unfinished(now=1.5), lines.unfinished(now=3.0)
    ([], ['done'])
    """

    def __init__(self, *, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._raw = ""
        self._changed_at = 0.0  # when the unfinished line last changed
        self._shown_at: float | None = None  # when the unfinished line began or was last shown
        self._shown = ""  # what was last shown of it

    @property
    def is_pending(self) -> bool:
        """Whether an unfinished line waits to be shown."""
        return bool(self._raw)

    def feed(self, text: str, *, now: float) -> list[str]:
        """Returns the lines that `text` finishes."""
        *finished, unfinished_line = text.split("\n")
        lines = [line for piece in finished for line in self._finish(piece)]
        if unfinished_line:
            self._raw += unfinished_line
            self._changed_at = now
            if self._shown_at is None:
                self._shown_at = now
            if len(self._raw) > _MAX_PENDING_CHARACTERS:
                lines += self._cut()
        return lines

    def unfinished(self, *, now: float) -> list[str]:
        """Returns the unfinished line if it is due."""
        if not self._raw or self._shown_at is None:
            return []
        if "\r" not in self._raw and "\b" not in self._raw:
            return self._cut() if now - self._changed_at >= self._interval else []
        text = render(self._raw)
        if now - self._shown_at < self._interval or not text or text == self._shown:
            return []
        self._shown_at, self._shown = now, text
        return [text]

    def flush(self) -> list[str]:
        """Returns the rest at the end of the stream."""
        return self._finish("") if self._raw else []

    def _finish(self, piece: str) -> list[str]:
        raw, shown = self._raw + piece, self._shown
        self._raw, self._shown, self._shown_at = "", "", None
        text = render(raw)
        # Nothing new: the end of a line that was shown already, or a progress bar that erased itself.
        if (shown and text in ("", shown)) or (not text and "\r" in raw.rstrip("\r")):
            return []
        return [text]

    def _cut(self) -> list[str]:
        text = render(self._raw)
        self._raw = ""
        self._shown = "\0" if text else self._shown  # so that a newline alone, later, adds no empty line
        return [text] if text else []


class StatusLine:
    r"""The line below all others on a terminal that shows the status of the run.

    Methods return the text to write to the terminal. The line never fills its row, because some terminals would then
    start a new one. The width of the terminal is read at every repaint.

    >>> reader, writer = os.pipe()  # not a terminal: 80 columns
    >>> line = StatusLine(writer, has_style=False, is_ascii=False)
    >>> line.update("2 workers", now=0.0)
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
    def on(cls, fd: int, environ: Mapping[str, str], encoding: str) -> "StatusLine | None":
        """Returns the line of a terminal that can repaint it, or None for any other file.

        TERM and NO_COLOR of the environment are used.
        """
        if not os.isatty(fd) or environ.get("TERM", "dumb") in ("", "dumb"):
            return None
        is_ascii = encoding.lower().replace("-", "") != "utf8"
        return cls(fd, has_style=not environ.get("NO_COLOR"), is_ascii=is_ascii)

    def is_on(self, fd: int) -> bool:
        """Whether a file descriptor is the same terminal."""
        return os.isatty(fd) and os.fstat(fd).st_rdev == os.fstat(self._terminal).st_rdev

    def around(self, lines: str) -> str:
        """Returns `lines`, which end with a newline, preceded by code that erases the line and followed by the line."""
        self._painted = self._fitted()
        # The line is erased even if this process has painted none: the process that it was forked from may have.
        return f"{_ERASE_LINE}{lines}{self._painted}"

    def update(self, text: str, *, now: float) -> str:
        """Returns code that shows `text`; empty if it is shown already, or was repainted less than 0.2 s ago.

        An empty text erases the line.
        """
        self._text = text
        fitted = self._fitted()
        if fitted == self._painted or (text and now - self._painted_at < _REPAINT_SECONDS):
            return ""
        self._painted, self._painted_at = fitted, now
        return f"{_ERASE_LINE}{fitted}"

    def _fitted(self) -> str:
        try:
            columns = os.get_terminal_size(self._terminal).columns or 80
        except OSError:
            columns = 80
        if not self._text or columns < _MIN_COLUMNS:
            return ""
        text = self._text if len(self._text) < columns else self._text[: columns - 2] + "…"
        text = text.translate(_ASCII) if self._is_ascii else text
        return f"{_DIM}{text}{_RESET}" if self._has_style else text
