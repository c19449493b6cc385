"""The process that ends the workers' children when the launcher is killed.

The kernel kills the workers themselves when the launcher dies (see `linux.die_with_parent`), but not what they started.
The guardian is a fork of the launcher that reads a pipe. At its end, however the launcher ended, it kills the groups
that are still named.
"""

import contextlib
import os
import signal
import warnings


class Guardian:
    """A small process that outlives the launcher by a moment. Must be made while the launcher has one thread."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of threads; only a caller other than the command line can have any.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                _guard(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def watch(self, group: int) -> None:
        """Names a process group to kill when the launcher dies."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Takes a group back, because it is gone."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the guardian. What is still named is killed."""
        os.close(self._writer)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass

    def _tell(self, line: str) -> None:
        try:
            os.write(self._writer, line.encode())
        except BrokenPipeError:  # someone killed it; the workers themselves still die with the launcher
            pass


def _guard(reader: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    # A reader of the launcher's output must see its end when the launcher ends, not when this process does.
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != reader:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
    groups: set[int] = set()
    with open(reader) as pipe:
        for line in pipe:
            if line.startswith("+"):
                groups.add(int(line[1:]))
            else:
                groups.discard(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
