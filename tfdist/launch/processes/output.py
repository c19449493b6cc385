"""The output of workers and launcher: lines as a terminal shows them, behind prefixes; log files, and last lines."""

import codecs
import collections
import contextlib
import datetime
import errno
import os
import re
import select
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from tfdist.launch.processes.run_status import RunStatus, StatusLine
from tfdist.launch.run_spec import Role
from tfdist.utils.argument_checks import UsageError

_UNFINISHED_SECONDS = 2.0
# More lines than are shown, because the start of a long traceback is needed, too (see worker_exit.py).
_KEPT_LINES = 200
_IS_LOGGED_AT_START = re.compile(
    r"I0000 |\d{4}-\d\d-\d\d \S+: I (tensorflow|external)/|To enable the following instructions: |"
    r"WARNING: All log messages before absl::InitializeLog\(\) is called "
)
_MAX_PENDING_CHARACTERS = 65_536
# Removes cursor movements and other controls, which would act on the launcher's terminal. Colours and tabs stay.
_CONTROLS = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # other sequences that begin with ESC [
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # window titles and links
    r"|\x1b[ -/]*[0-Z\\^-~]?"
    r"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)
_RESET = "\x1b[0m"


class OutputClosed(Exception):
    """The reader of the launcher's output is gone."""


class Console:
    """The launcher's own output, written line by line and immediately, above the status line on a terminal.

    `node` is the number of this node, where the output of several nodes is one stream; None: it is this node's own.
    """

    def __init__(
        self, stdout: int, stderr: int, *, status_line: StatusLine | None = None, node: int | None = None
    ) -> None:
        self._stdout, self._stderr, self._status_line = stdout, stderr, status_line
        self._prefix = "tfdist: " if node is None else f"tfdist: node {node}: "
        self._shows_news_of_all = not node
        self._above = {fd for fd in (stdout, stderr) if status_line is not None and status_line.is_on(fd)}
        self._status: RunStatus | None = None
        self._is_ending: Callable[[], bool] = lambda: False

    def outlive_reader(self, when: Callable[[], bool]) -> None:
        """Drops output instead of raising `OutputClosed` if the reader is gone while `when()` is true."""
        self._is_ending = when

    @property
    def has_status_line(self) -> bool:
        return self._status_line is not None and self._status is not None

    def follow(self, status: RunStatus | None, *, now: float) -> None:
        """Starts to show the status of an attempt, or, with None, ends that."""
        previous_status, self._status = self._status, status
        if self._status_line is not None:
            self._paint(self._status_line.update("", now=now))
        elif previous_status is not None and status is None:
            self.say(*previous_status.new_messages(now=now, is_over=True))

    def show_status(self, *, now: float) -> None:
        """Shows what has changed. Call this several times a second."""
        if self._status is None:
            return
        if self._status_line is None:
            self.say(*self._status.new_messages(now=now))
        else:
            self._paint(self._status_line.update(self._status.line(now=now), now=now))

    def say(self, *lines: str) -> None:
        self.write(self._prefix, lines, is_error=True)

    def say_to_all(self, *lines: str) -> None:
        """Shows messages that the launchers of all nodes have received, once in their common output."""
        if self._shows_news_of_all:
            self.write("tfdist: ", lines, is_error=True)

    def say_unless_blocked(self, line: str) -> None:
        """Shows a message of the launcher unless that would wait for a reader, or there is none."""
        if select.select([], [self._stderr], [], 0)[1]:
            with contextlib.suppress(OutputClosed):
                self.say(line)

    def write(self, prefix: str, lines: Sequence[str], *, is_error: bool) -> None:
        """Shows lines behind a prefix, in one system call where possible."""
        if lines:
            text = "".join(f"{prefix}{line}\n" for line in lines)
            fd = self._stderr if is_error else self._stdout
            if self._status_line is not None and fd in self._above:
                text = self._status_line.around(text)
            self._put(fd, text)

    def _paint(self, text: str) -> None:
        # Do not wait for a paused terminal.
        if text and select.select([], [self._stderr], [], 0)[1]:
            self._put(self._stderr, text)

    def _put(self, fd: int, text: str) -> None:
        try:
            _write_all(fd, text.encode(errors="replace"))
        except OutputClosed:
            if not self._is_ending():
                raise


class LogFiles:
    """The log file of each process, for example `rank-0.log`, in a directory that is created; None: no files."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._error(error) from error

    def open(self, roles: Mapping[int, Role], *, attempt: int, joins_late: bool = False) -> dict[int, BinaryIO | None]:
        """Returns the files of an attempt: empty in the first attempt; later, continued after a separator.

        They are also continued in a first attempt that this host `joins_late`.
        """
        is_continued = attempt > 0 or joins_late
        if self._directory is None:
            return dict.fromkeys(roles)
        files: dict[int, BinaryIO | None] = {}
        for rank, role in roles.items():
            if role.log_name not in self._files:
                path = self._directory / role.log_name
                try:
                    self._files[role.log_name] = open(path, "ab" if is_continued else "wb", buffering=0)
                except OSError as error:
                    raise self._error(error) from error
            files[rank] = self._files[role.log_name]
        if is_continued:
            time_of_day = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            for file in filter(None, files.values()):
                with contextlib.suppress(OSError):  # a full disk does not end the run
                    file.write(f"==== attempt {attempt}, {time_of_day} ====\n".encode())
        return files

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _error(self, error: OSError) -> UsageError:
        return UsageError(
            f"The log files cannot be created. Received: --log-dir {self._directory} ({error.strerror}). Expected: a "
            "writable directory that exists or can be created. Choose another one."
        )


def render(raw: str) -> str:
    """Returns what a terminal finally shows of a line."""
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
    """Splits a stream into lines as a terminal shows them.

    An unfinished line is shown after `interval_seconds` without a change. A line that is being rewritten, such as a
    progress bar, is shown at most once in this time.
    """

    def __init__(self, *, interval_seconds: float) -> None:
        self._interval = interval_seconds
        self._raw = ""
        self._changed_at = 0.0  # when the unfinished line last changed
        self._shown_at: float | None = None  # when the unfinished line began or was last shown
        self._shown = ""  # what was last shown of it

    @property
    def is_pending(self) -> bool:
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


class WorkerOutput:
    """The two output streams of one worker. The log receives both streams without the prefix."""

    def __init__(self, label: str, console: Console, log: BinaryIO | None) -> None:
        self._prefix = f"[{label}] "
        self._console, self._log = console, log
        self._log_misses_lines = False
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {is_error: decoder(errors="replace") for is_error in (False, True)}
        self._splitters = {is_error: LineSplitter(interval_seconds=_UNFINISHED_SECONDS) for is_error in (False, True)}

    @property
    def is_pending(self) -> bool:
        return any(splitter.is_pending for splitter in self._splitters.values())

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of both streams, in order of time, without what TensorFlow logs whenever it starts."""
        return tuple(self._last)

    def feed(self, data: bytes, *, is_error: bool, now: float) -> None:
        self._show(self._splitters[is_error].feed(self._decoders[is_error].decode(data), now=now), is_error)

    def show_unfinished(self, *, now: float) -> None:
        for is_error, splitter in self._splitters.items():
            self._show(splitter.unfinished(now=now), is_error)

    def flush(self, *, now: float) -> None:
        """Shows the rest of both streams when the worker has exited."""
        for is_error, splitter in self._splitters.items():
            last_text = self._decoders[is_error].decode(b"", final=True)
            self._show(splitter.feed(last_text, now=now) + splitter.flush(), is_error)

    def _show(self, lines: Sequence[str], is_error: bool) -> None:
        self._last.extend(line for line in lines if not _IS_LOGGED_AT_START.match(line))
        if self._log is not None and lines:
            self._write_log(self._log, "".join(f"{line}\n" for line in lines))
        self._console.write(self._prefix, lines, is_error=is_error)

    def _write_log(self, log: BinaryIO, text: str) -> None:
        try:
            log.write(text.encode(errors="replace"))
        except OSError as error:  # a full disk does not end the run
            if not self._log_misses_lines:
                self._log_misses_lines = True
                self._console.say(f"{log.name} misses lines that are only shown here: {error.strerror}")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another process made the shared terminal or pipe non-blocking
            select.select([], [fd], [])
        except OSError as error:
            if error.errno == errno.EIO:  # the terminal was closed: SIGHUP ends the run, unless it is ignored
                return
            raise OutputClosed(error.strerror) from error
