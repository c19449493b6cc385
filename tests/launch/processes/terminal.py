"""A terminal for the launcher: a pseudo-terminal, and what its screen shows in the end."""

import fcntl
import os
import re
import select
import struct
import termios
import time
import tty

_CODES = re.compile(r"\x1b\[(?P<numbers>[0-9;]*)(?P<letter>[A-Za-z])")
LIMIT_SECONDS = 60


def screen(text: str, columns: int = 80) -> list[str]:
    """The rows of a screen of this width to which `text` was written, from the first one on."""
    rows, row, column = [""], 0, 0
    position = 0
    while position < len(text):
        code = _CODES.match(text, position)
        if code:
            position = code.end()
            if code["letter"] == "K":
                rows[row] = rows[row][:column]
            elif code["letter"] != "m":
                raise AssertionError(f"unexpected: {code[0]!r}")
            continue
        character, position = text[position], position + 1
        if character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            rows += [""] * (row == len(rows))
        else:
            if column == columns:
                row, column = row + 1, 0
                rows += [""] * (row == len(rows))
            rows[row] = rows[row][:column].ljust(column) + character + rows[row][column + 1 :]
            column += 1
    return rows


class Terminal:
    """A pseudo-terminal; `end` is the descriptor to be given to a process."""

    def __init__(self, columns: int = 80) -> None:
        self._own, self.end = os.openpty()
        tty.setraw(self.end)  # no "\r\n" for "\n"
        self.resize(columns)
        self.text = ""

    def resize(self, columns: int) -> None:
        self.columns = columns
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self, seconds: float = 0.0) -> str:
        """Takes what was written, and returns it."""
        new = b""
        while select.select([self._own], [], [], 0.0 if new else seconds)[0]:
            try:
                piece = os.read(self._own, 65_536)
            except OSError:  # all other ends are closed
                break
            new += piece
            if not piece:
                break
        self.text += new.decode()
        return new.decode()

    def until(self, pattern: str, since: int = 0) -> str:
        """Reads until the pattern is found in what was written after the position `since`; returns what it matched."""
        end = time.monotonic() + LIMIT_SECONDS
        while not (found := re.search(pattern, self.text[since:])):
            assert time.monotonic() < end, f"timed out waiting for {pattern!r}; written was {self.text!r}"
            self.read(0.1)
        return found[0]

    def close(self) -> None:
        os.close(self._own)
        os.close(self.end)
