"""One worker: a process that leads its own session, and all that it starts."""

import os
import signal
import subprocess
from collections.abc import Container, Mapping, Sequence

from tfdist.launch.linux import die_with_parent, pidfd_open


class WorkerProcess:
    """A running worker.

    It leads a session, so that a signal can go to it with all its children, and Ctrl-C on the terminal reaches only
    the launcher. The kernel kills it when the launcher dies; the launcher must start it from its main thread, because
    the kernel looks at the thread.

    Args:
        rank: Its rank.
        command: Program and arguments.
        environ: Its whole environment.
    """

    def __init__(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.rank = rank
        launcher = os.getpid()
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(launcher),
        )
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
    while strays := [pid for pid in children() if pid not in spared]:
        for pid in strays:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError, PermissionError):
                pass


def children() -> list[int]:
    """Returns the process ids of the children of this process's only thread."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        return []
