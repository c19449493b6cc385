"""What the workers print: on the launcher's own output behind their rank, in log files, and their last lines."""

import codecs
import collections
import contextlib
import errno
import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from tfdist.launch.errors import UsageError
from tfdist.launch.live_line import LiveLine
from tfdist.launch.roles import Role
from tfdist.launch.run_status import RunStatus
from tfdist.launch.screen_line import ScreenLines

_UNFINISHED_SECONDS = 2.0
# More than is shown: a long traceback must still show where it begins (see failure.py).
_KEPT_LINES = 200


class OutputClosed(Exception):
    """Nobody reads the launcher's output any more."""


class Console:
    """The launcher's own output, written line by line and at once.

    Args:
        stdout: File descriptor for the workers' standard output.
        stderr: File descriptor for the workers' standard error and for what the launcher says.
        live: The line below the others on the terminal that `stderr` is, or None.
    """

    def __init__(self, stdout: int, stderr: int, *, live: LiveLine | None = None) -> None:
        self._stdout, self._stderr, self._live = stdout, stderr, live
        self._below = {fd for fd in (stdout, stderr) if live is not None and live.is_on(fd)}
        self._status: RunStatus | None = None
        self._is_ending: Callable[[], bool] = lambda: False

    def outlive_reader(self, when: Callable[[], bool]) -> None:
        """Shows nothing, instead of raising `OutputClosed`, where `when()` holds and nobody reads any more."""
        self._is_ending = when

    @property
    def is_live(self) -> bool:
        """Whether there is a line to be repainted."""
        return self._live is not None and self._status is not None

    def follow(self, status: RunStatus | None, *, now: float) -> None:
        """Begins to show the status of an attempt, or, with None, ends that.

        Args:
            status: Shown in the line below the others; where there is none, its news are said.
            now: Monotonic time in seconds.
        """
        before, self._status = self._status, status
        if self._live is not None:
            self._paint(self._live.painted("", now=now))
        elif before is not None and status is None:
            self.say(*before.news(now=now, is_over=True))

    def show_status(self, *, now: float) -> None:
        """Shows what has changed; to be called several times a second."""
        if self._status is None:
            return
        if self._live is None:
            self.say(*self._status.news(now=now))
        else:
            self._paint(self._live.painted(self._status.line(now=now), now=now))

    def say(self, *lines: str) -> None:
        """Shows lines of the launcher itself."""
        self.write("tfdist: ", lines, is_error=True)

    def say_unless_stuck(self, line: str) -> None:
        """Shows a line of the launcher, but not where that would have to wait for a reader, or there is none."""
        if select.select([], [self._stderr], [], 0)[1]:
            with contextlib.suppress(OutputClosed):
                self.say(line)

    def write(self, prefix: str, lines: Sequence[str], *, is_error: bool) -> None:
        """Shows lines behind a prefix, all in one piece where the system allows.

        Raises:
            OutputClosed: If nobody reads any more.
        """
        if lines:
            text = "".join(f"{prefix}{line}\n" for line in lines)
            fd = self._stderr if is_error else self._stdout
            if self._live is not None and fd in self._below:
                text = self._live.around(text)
            self._put(fd, text)

    def _paint(self, text: str) -> None:
        # A paused terminal is not waited for.
        if text and select.select([], [self._stderr], [], 0)[1]:
            self._put(self._stderr, text)

    def _put(self, fd: int, text: str) -> None:
        try:
            _write_all(fd, text.encode(errors="replace"))
        except OutputClosed:
            if not self._is_ending():
                raise


def open_logs(directory: Path | None, roles: Sequence[Role]) -> list[BinaryIO | None]:
    """Opens a file for each process, for example `rank-0.log`, emptying those of an earlier run.

    Args:
        directory: Made where it does not exist. None: no files.
        roles: What the processes are.

    Raises:
        UsageError: If a file cannot be made.
    """
    if directory is None:
        return [None] * len(roles)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [open(directory / role.log_name, "wb", buffering=0) for role in roles]
    except OSError as error:
        raise UsageError(
            f"The log files cannot be made. Received: --log-dir {directory} ({error.strerror}). Expected: a directory "
            "that exists or can be made, and written to. Choose another one."
        ) from error


class WorkerOutput:
    """The two streams of one worker.

    Args:
        label: What stands before its lines, in brackets.
        console: Where the lines are shown.
        log: Where both streams are written without the prefix.
    """

    def __init__(self, label: str, console: Console, log: BinaryIO | None) -> None:
        self._prefix = f"[{label}] "
        self._console, self._log = console, log
        self._log_misses_lines = False
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {is_error: decoder(errors="replace") for is_error in (False, True)}
        self._lines = {is_error: ScreenLines(interval_seconds=_UNFINISHED_SECONDS) for is_error in (False, True)}

    @property
    def is_pending(self) -> bool:
        """Whether an unfinished line waits to be shown."""
        return any(lines.is_pending for lines in self._lines.values())

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of both streams, in the order in which they came."""
        return tuple(self._last)

    def feed(self, data: bytes, *, is_error: bool, now: float) -> None:
        """Takes the next bytes of a stream."""
        self._show(self._lines[is_error].feed(self._decoders[is_error].decode(data), now=now), is_error)

    def show_unfinished(self, *, now: float) -> None:
        """Shows unfinished lines whose time has come."""
        for is_error, lines in self._lines.items():
            self._show(lines.unfinished(now=now), is_error)

    def flush(self, *, now: float) -> None:
        """Shows what is left when the worker has ended."""
        for is_error, lines in self._lines.items():
            rest = self._decoders[is_error].decode(b"", final=True)
            self._show(lines.feed(rest, now=now) + lines.flush(), is_error)

    def _show(self, lines: Sequence[str], is_error: bool) -> None:
        self._last.extend(lines)
        if self._log is not None and lines:
            self._keep(self._log, "".join(f"{line}\n" for line in lines))
        self._console.write(self._prefix, lines, is_error=is_error)

    def _keep(self, log: BinaryIO, text: str) -> None:
        try:
            log.write(text.encode(errors="replace"))
        except OSError as error:  # a full disk is no reason to end the run
            if not self._log_misses_lines:
                self._log_misses_lines = True
                self._console.say(f"{log.name} misses lines that are only shown here: {error.strerror}")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # someone else made the shared terminal or pipe non-blocking
            select.select([], [fd], [])
        except OSError as error:
            if error.errno == errno.EIO:  # the terminal was closed: SIGHUP says what follows, unless it is ignored
                return
            raise OutputClosed(error.strerror) from error
