"""A `tfdist run` below a notebook's process: its output goes into the cell, and an interrupt of the cell to it."""

import codecs
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

from tfdist.launch.notebook_process import program

_PIECE_BYTES = 65_536
_POLL_SECONDS = 0.2
_KEPT_LINES = 20
_MAX_POLITE_INTERRUPTS = 2
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*) ([^\s;,()]*[^\s;,().])")
_ERROR = "tfdist run: error: "
# TensorFlow 2.21 prints these whatever its TF_CPP_MIN_LOG_LEVEL is.
_INFORMATION = re.compile(r"\[\d+\] (I\d{4} [\d:.]+ +\d+ |WARNING: All log messages before absl::InitializeLog)")
# The last lines of a worker, which the cell shows already.
_QUOTED, _BEFORE_QUOTED = "tfdist:   | ", " Its last lines:"


class NotebookLauncher:
    """The process. It is killed when the `with` block ends, and by the kernel when this process or thread ends.

    It leads a session, so that an interrupt that goes to the notebook's process group reaches this process alone.

    Args:
        arguments: Those of `tfdist`.

    Raises:
        OSError: If the system has no room for another process.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        environ = dict(os.environ)
        if environ.get("MPLBACKEND", "").startswith("module://"):
            del environ["MPLBACKEND"]  # draws into a notebook's cell
        self._process = subprocess.Popen(
            [sys.executable, "-c", program("launch", os.getpid(), list(arguments))],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        level = environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
        self._hides_information = level.isdigit() and int(level) > 0
        self._last_words: list[str] = []
        self.error = ""

    def __enter__(self) -> "NotebookLauncher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def last_words(self) -> tuple[str, ...]:
        """The last lines that were no worker's."""
        return tuple(self._last_words)

    def follow(self) -> int:
        """Shows what is printed until the process has ended.

        The first interrupt tells the workers to end, the second has them killed, the third kills the launcher.

        Returns:
            Its exit code, or minus the number of the signal that killed it.

        Raises:
            KeyboardInterrupt: If there was one, when all has ended.
        """
        interrupts: list[KeyboardInterrupt] = []
        with _Streams(self._process, self._show) as streams:
            while True:
                try:
                    streams.pass_on()
                    code = self._process.wait()
                    break
                except KeyboardInterrupt as interrupt:
                    interrupts.append(interrupt)
                    is_polite = len(interrupts) <= _MAX_POLITE_INTERRUPTS
                    self._process.send_signal(signal.SIGINT if is_polite else signal.SIGKILL)
        if interrupts:
            raise KeyboardInterrupt from None
        return code

    def _show(self, line: str, is_error: bool) -> None:
        if line.startswith(_ERROR):
            self.error = in_python(line.removeprefix(_ERROR))
            return
        if is_error and line.startswith("["):
            if self._hides_information and _INFORMATION.match(line):
                return
        elif is_error:
            if line.startswith(_QUOTED):
                return
            line = in_python(line).removesuffix(_BEFORE_QUOTED)
            self._last_words = [*self._last_words, line][-_KEPT_LINES:]
        print(line, file=sys.stderr if is_error else sys.stdout, flush=True)


class _Streams:
    """The two streams of a process, cut into lines."""

    def __init__(self, process: "subprocess.Popen[bytes]", show: Callable[[str, bool], None]) -> None:
        self._process, self._show = process, show
        self._selector = selectors.DefaultSelector()
        self._rest = {False: "", True: ""}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = {is_error: decoder(errors="replace") for is_error in self._rest}
        for pipe, is_error in ((process.stdout, False), (process.stderr, True)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._selector.register(pipe, selectors.EVENT_READ, is_error)

    def __enter__(self) -> "_Streams":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()

    def pass_on(self) -> None:
        """Shows lines until both streams end, or the process has ended and nothing more is to be read."""
        while self._selector.get_map():
            has_ended = self._process.poll() is not None
            ready = self._selector.select(_POLL_SECONDS)
            for key, _ in ready:
                self._read(key.fd, is_error=key.data)
            if has_ended and not ready:  # something that the process has left behind holds the other end
                return

    def _read(self, fd: int, *, is_error: bool) -> None:
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(fd)
        text = self._rest[is_error] + self._decoders[is_error].decode(data, final=not data)
        *lines, self._rest[is_error] = text.split("\n")
        if not data and self._rest[is_error]:
            lines.append(self._rest[is_error])
        for line in lines:
            self._show(line, is_error)


def in_python(line: str) -> str:
    """Returns what the launcher says with its options as arguments of `from_notebook`.

    >>> in_python("scripts that need the internet: --network host; no restart is left (--max-restarts 1)")
    "scripts that need the internet: network='host'; no restart is left (max_restarts=1)"
    """
    return _OPTION.sub(lambda found: f"{found[1].replace('-', '_')}={_value(found[2])}", line)


def _value(text: str) -> str:
    return text if text.isdigit() else repr(text)
