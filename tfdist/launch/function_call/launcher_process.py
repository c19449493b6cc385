"""The `tfdist` process of a function call: shows its output and passes interrupts on to it."""

import codecs
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from tfdist.launch.function_call.child_programs import program

_CHUNK_BYTES = 65_536
_POLL_SECONDS = 0.2
_LAST_LINES = 20
_MAX_FORWARDED_INTERRUPTS = 2
_PYTHON_NAMES = {"grace": "grace_seconds"}  # names that are not those of the command line
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*) ([^\s;,()]*[^\s;,().])")
_ERROR = re.compile(r"tfdist (run|plan): error: ")
# TensorFlow 2.21 prints these lines at any TF_CPP_MIN_LOG_LEVEL.
_INFORMATION = re.compile(r"\[\d+\] (I\d{4} [\d:.]+ +\d+ |WARNING: All log messages before absl::InitializeLog)")
# The launcher repeats the last lines of a failed worker, which the cell has already shown.
_QUOTED, _BEFORE_QUOTED = "tfdist:   | ", " Its last lines:"


def _print(line: str, is_error: bool) -> None:
    print(line, file=sys.stderr if is_error else sys.stdout, flush=True)


class LauncherProcess:
    """A `tfdist` process, killed when the `with` block ends, or by the kernel when this process or thread ends.

    It is the leader of a session, so that an interrupt of this process's group reaches only this one. `error` is its
    message about a wrong command, or an empty string.

    Args:
        arguments: Arguments of `tfdist`.
        printed: The path of a file for what the process itself prints to its standard output; empty: shows it.
        directory: If given, the kernel does not kill the process when this one dies, but sends SIGTERM, so that workers
            can save; it then removes this directory.
        is_killed: With `directory`: whether it is killed when this process dies, after it has removed the directory.
        environ: Its environment; None: that of this process.
        show: Called with each line of its output, and with whether it was an error stream's. By default prints it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        printed: str = "",
        directory: str = "",
        is_killed: bool = False,
        environ: Mapping[str, str] | None = None,
        show: Callable[[str, bool], None] = _print,
    ) -> None:
        environ = dict(os.environ if environ is None else environ)
        if environ.get("MPLBACKEND", "").startswith("module://"):
            del environ["MPLBACKEND"]  # a backend that draws into notebook cells
        source = (
            program("run_orphaned_launcher", os.getpid(), list(arguments), directory, is_killed=is_killed)
            if directory
            else program("run_launcher", os.getpid(), list(arguments), printed)
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", source],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        level = environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
        self._hides_information = level.isdigit() and int(level) > 0
        self._shown = show
        self._last_lines: list[str] = []
        self.error = ""

    def __enter__(self) -> "LauncherProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the launcher itself printed."""
        return tuple(self._last_lines)

    def follow(self, poll: Callable[[], None] = lambda: None) -> int:
        """Shows the output until the process has ended.

        The first interrupt ends the workers with SIGTERM, the second kills them, the third kills the launcher;
        then, after all processes have ended, it is raised. `poll` is called a few times a second.

        Returns the exit code, or minus the number of the signal that killed the process.
        """
        interrupts: list[KeyboardInterrupt] = []
        with _Streams(self._process, self._show) as streams:
            while True:
                try:
                    streams.show_all(poll)
                    code = self._process.wait()
                    break
                except KeyboardInterrupt as interrupt:
                    interrupts.append(interrupt)
                    is_forwarded = len(interrupts) <= _MAX_FORWARDED_INTERRUPTS
                    self.send_signal(signal.SIGINT if is_forwarded else signal.SIGKILL)
        if interrupts:
            raise KeyboardInterrupt from None
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process unless it has ended; SIGKILL also to the one for which it forwards signals."""
        if number == signal.SIGKILL and self._process.poll() is None:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def _show(self, line: str, is_error: bool) -> None:
        if _ERROR.match(line):
            self.error = in_python(_ERROR.sub("", line, count=1))
            return
        if is_error and line.startswith("["):
            if self._hides_information and _INFORMATION.match(line):
                return
        elif is_error:
            if line.startswith(_QUOTED):
                return
            line = in_python(line).removesuffix(_BEFORE_QUOTED)
            self._last_lines = [*self._last_lines, line][-_LAST_LINES:]
        self._shown(line, is_error)


class _Streams:
    """Reads the lines of a process's stdout and stderr."""

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

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    def show_all(self, poll: Callable[[], None]) -> None:
        """Shows lines until both streams are closed, or the process has ended and there is nothing to read."""
        while self._selector.get_map():
            has_ended = self._process.poll() is not None
            ready = self._selector.select(_POLL_SECONDS)
            poll()
            for key, _ in ready:
                self._read(key.fd, is_error=key.data)
            if has_ended and not ready:  # a remaining child process holds the pipe open
                return

    def _read(self, fd: int, *, is_error: bool) -> None:
        try:
            data = os.read(fd, _CHUNK_BYTES)
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
    """Rewrites the launcher's options as arguments of `from_notebook` and of the calls of engines.

    >>> in_python("scripts that need the internet: --network host; after --grace 5 (--max-restarts 1)")
    "scripts that need the internet: network='host'; after grace_seconds=5 (max_restarts=1)"
    """

    def argument(option: re.Match[str]) -> str:
        name = _PYTHON_NAMES.get(option[1], option[1].replace("-", "_"))
        return f"{name}={option[2] if option[2].isdigit() else repr(option[2])}"

    return _OPTION.sub(argument, line)
