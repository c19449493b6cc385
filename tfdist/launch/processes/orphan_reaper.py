"""Ends the processes that workers leave behind, also when the launcher itself is killed.

The kernel kills the workers when the launcher dies (see `linux_syscalls.die_with_parent`), but not their children.
"""

import contextlib
import functools
import os
import secrets
import shutil
import signal
import time
from collections.abc import Container
from pathlib import Path

from tfdist.launch.processes.stop_signals import STOP_SIGNALS
from tfdist.utils.linux_syscalls import fork

_SHARED_MEMORY = "/dev/shm"
_REMOVAL_SECONDS, _PAUSE_SECONDS = 10.0, 0.05


class OrphanReaper:
    """A fork of the launcher that kills process groups, and frees the memory of the run, when the launcher dies.

    The fork reads a pipe from the launcher. When the pipe is closed, however the launcher ended, it kills all groups
    that are still registered, and removes what the workers kept in shared memory. Create it while the launcher has one
    thread.
    """

    def __init__(self, memory: Path | None = None) -> None:
        """Starts the fork, which also removes the directory `memory` at the end."""
        reader, self._writer = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            try:
                _reap_when_closed(reader)
                _remove(memory)
            finally:
                os._exit(0)
        os.close(reader)

    def watch(self, group: int) -> None:
        """Registers a process group to kill when the launcher dies."""
        self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Unregisters a group because all of its processes have exited."""
        self._send(f"-{group}\n")

    def close(self) -> None:
        """Ends the reaper, which kills the groups that are still registered."""
        os.close(self._writer)
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:
            pass

    def _send(self, line: str) -> None:
        try:
            os.write(self._writer, line.encode())
        except BrokenPipeError:  # it was killed; the workers themselves still die with the launcher
            pass


def _reap_when_closed(reader: int) -> None:
    os.setsid()
    for number in STOP_SIGNALS:
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


@functools.cache
def memory_directory() -> Path | None:
    """Returns where the workers of this launcher may keep what outlives them; None if there is no shared memory."""
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return None
    return Path(_SHARED_MEMORY, f"tfdist-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}")


def _remove(memory: Path | None) -> None:
    end = time.monotonic() + _REMOVAL_SECONDS
    while memory is not None and memory.exists() and time.monotonic() < end:
        shutil.rmtree(memory, ignore_errors=True)
        time.sleep(_PAUSE_SECONDS)  # a worker that is being killed may still write


def kill_orphans(*, spared: Container[int]) -> None:
    """Kills all children of this process: those that have left the process group of their worker."""
    not_permitted: set[int] = set()  # processes of another user, as by sudo
    while orphans := [pid for pid in child_pids() if pid not in spared and pid not in not_permitted]:
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except PermissionError:
                not_permitted.add(pid)
            except (ProcessLookupError, ChildProcessError):
                pass


def reap_orphans(*, spared: Container[int]) -> None:
    """Reaps the children of this process that have exited."""
    for pid in child_pids():
        if pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def child_pids() -> list[int]:
    """Returns the process ids of the children of this process, which has one thread."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        return []
