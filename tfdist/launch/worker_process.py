"""One worker: a process that leads its own session, and all that it starts."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.cluster.heartbeat import VARIABLE
from tfdist.launch.linux import die_with_parent, pidfd_open

_MAX_DATAGRAM_BYTES = 65_536
_DATAGRAMS_AT_ONCE = 1_000  # a worker that never stops talking must not hold the launcher


class WorkerProcess:
    """A running worker.

    It leads a session, so that a signal can go to it with all its children, and Ctrl-C on the terminal reaches only
    the launcher. The kernel kills it when the launcher dies; the launcher must start it from its main thread, because
    the kernel looks at the thread.

    Args:
        rank: Its rank.
        command: Program and arguments.
        environ: Its whole environment, but for the number of its heartbeat socket.
        pass_fds: Descriptors that it inherits besides the standard ones.

    Raises:
        OSError: If the system has no room for another process.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], *, pass_fds: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        launcher = os.getpid()
        self.heartbeats, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.heartbeats.setblocking(False)
        try:
            self._process = subprocess.Popen(
                command,
                env={**environ, VARIABLE: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=(theirs.fileno(), *pass_fds),
                preexec_fn=lambda: die_with_parent(launcher),
            )
        except BaseException:
            self.heartbeats.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.pidfd = pidfd_open(self.pid)
        self.told: list[int] = []  # the signals it was sent while it ran
        self._group_is_gone = False
        if self._process.stdout is None or self._process.stderr is None:
            raise RuntimeError("a worker was started without pipes")
        # From the stream's descriptor to whether it is the standard error.
        self.streams = {self._process.stdout.fileno(): False, self._process.stderr.fileno(): True}
        for fd in self.streams:
            os.set_blocking(fd, False)

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number, or None: as of the last `reap`."""
        return self._process.returncode

    def reap(self) -> int | None:
        """Collects the process if it has ended, and returns its `returncode`."""
        return self._process.poll()

    def wait(self, timeout_seconds: float) -> None:
        """Waits until the process has ended, but not for longer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)

    def heard(self) -> Iterator[bytes]:
        """Yields the heartbeats that have arrived."""
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                yield self.heartbeats.recv(_MAX_DATAGRAM_BYTES)
            except OSError:  # no more of them, or its end is closed
                return

    def is_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP. Not: by a debugger."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[:1] == [b"T"]

    def tell(self, number: int) -> None:
        """Sends a signal to the worker and all that it started in its session's group."""
        if self.is_gone():
            return
        if self.returncode is None:
            self.told.append(number)
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def is_gone(self) -> bool:
        """Whether the worker has been reaped and nothing of its group is left."""
        if self.returncode is None:
            return False
        # Once the group is empty its number may belong to someone else.
        if not self._group_is_gone:
            self._group_is_gone = _is_group_empty(self.pid)
        return self._group_is_gone

    def close(self) -> None:
        """Closes the descriptors."""
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self.heartbeats.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _is_group_empty(group: int) -> bool:
    # Orphans of the worker are children of the launcher now; a zombie would count as a member.
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def end_strays(*, spared: Container[int]) -> None:
    """Kills every child of this process, for as long as there is one: what left the group of its worker.

    Args:
        spared: Process ids of the children to leave alone.
    """
    beyond: set[int] = set()  # of another user, as by sudo
    while strays := [pid for pid in children() if pid not in spared and pid not in beyond]:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except PermissionError:
                beyond.add(pid)
            except (ProcessLookupError, ChildProcessError):
                pass


def collect_orphans(*, spared: Container[int]) -> None:
    """Reaps the children of this process that have ended.

    Args:
        spared: Process ids of the children that others reap.
    """
    for pid in children():
        if pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def children() -> list[int]:
    """Returns the process ids of the children of this process's only thread."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        return []
