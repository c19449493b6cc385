"""A stream of terminal text, turned into lines for many readers.

A progress bar rewrites its line with carriage returns or backspaces. Shown among the lines of other workers that would
be garbage, so a rewritten line is reduced to its last version, and shown now and then while it changes.
"""

import re

_MAX_PENDING = 65_536
# Cursor movements and other controls would act on the launcher's terminal; colours and tabs may pass.
_CONTROLS = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # other sequences that begin with ESC [
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[ -/]*[0-Z\\^-~]?"
    r"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)
_RESET = "\x1b[0m"


def rendered(raw: str) -> str:
    r"""Returns what a line shows in the end.

    Args:
        raw: The line as written, without its newline.

    >>> rendered("1/3\r2/3\r3/3\r")
    '3/3'
    >>> rendered("100\b\b\b200")
    '200'
    """
    text = _CONTROLS.sub(lambda match: match["colour"] or "", raw)
    rewritten = "\r" in text
    text = next((version for version in reversed(text.split("\r")) if version), "")
    if "\b" in text:
        kept: list[str] = []
        for character in text:
            if character != "\b":
                kept.append(character)
            elif kept:
                kept.pop()
        text = "".join(kept)
    if rewritten and not text.strip():
        return ""
    if "\x1b" in text and not text.endswith(_RESET):
        text += _RESET
    return text


class ScreenLines:
    r"""Cuts a stream into lines.

    Args:
        interval_seconds: A line that is not finished is shown after this time without a change; a line that is being
            rewritten is shown at most once in this time.

    >>> lines = ScreenLines(interval_seconds=2.0)
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
        self._shown_at: float | None = None  # when the unfinished line began, or was last shown
        self._shown = ""  # what was last shown of it

    @property
    def is_pending(self) -> bool:
        """Whether an unfinished line waits."""
        return bool(self._raw)

    def feed(self, text: str, *, now: float) -> list[str]:
        """Returns the lines that `text` finishes.

        Args:
            text: The next piece of the stream.
            now: Monotonic time in seconds.
        """
        *finished, rest = text.split("\n")
        lines = [line for piece in finished for line in self._finish(piece)]
        if rest:
            self._raw += rest
            self._changed_at = now
            if self._shown_at is None:
                self._shown_at = now
            if len(self._raw) > _MAX_PENDING:
                lines += self._cut()
        return lines

    def unfinished(self, *, now: float) -> list[str]:
        """Returns the unfinished line where it is time to show it."""
        if not self._raw or self._shown_at is None:
            return []
        if "\r" not in self._raw and "\b" not in self._raw:
            return self._cut() if now - self._changed_at >= self._interval else []
        text = rendered(self._raw)
        if now - self._shown_at < self._interval or not text or text == self._shown:
            return []
        self._shown_at, self._shown = now, text
        return [text]

    def flush(self) -> list[str]:
        """Returns what is left at the end of the stream."""
        return self._finish("") if self._raw else []

    def _finish(self, piece: str) -> list[str]:
        raw, shown = self._raw + piece, self._shown
        self._raw, self._shown, self._shown_at = "", "", None
        text = rendered(raw)
        # Nothing new: the end of what was shown already, or a progress bar that wiped itself out.
        if (shown and text in ("", shown)) or (not text and "\r" in raw.rstrip("\r")):
            return []
        return [text]

    def _cut(self) -> list[str]:
        text = rendered(self._raw)
        self._raw = ""
        self._shown = "\0" if text else self._shown  # so that a newline alone, later, adds no empty line
        return [text] if text else []
