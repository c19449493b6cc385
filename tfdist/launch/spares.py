"""Warm spares: processes that have imported TensorFlow and wait to become the workers of the next attempt."""

import json
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.launch.worker_process import WorkerProcess

_PROGRAM = str(Path(__file__).with_name("spare_main.py"))
_MAX_DEATHS = 3
_UNKILLABLE_SECONDS = 5.0


class _Spare:
    """A process that waits."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel.setblocking(False)
        self._is_warm = False
        try:
            # The command begins with the interpreter.
            line = [command[0], _PROGRAM, str(theirs.fileno()), *command[1:]]
            self.worker = WorkerProcess(-1, line, environ, pass_fds=(theirs.fileno(),))
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()

    @property
    def is_warm(self) -> bool:
        """Whether it has imported everything."""
        if not self._is_warm:
            try:
                self._is_warm = bool(self._channel.recv(1))
            except OSError:
                pass
        return self._is_warm

    def become(self, rank: int, environ: Mapping[str, str]) -> bool:
        """Makes it a worker; returns False where it has died."""
        self._channel.setblocking(True)
        try:
            self._channel.sendall(json.dumps(dict(environ)).encode())
            self._channel.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        self.worker.rank = rank
        return True

    def close(self) -> None:
        """Closes the connection. Not before it has read what it was told: unread words of its own would reset it."""
        self._channel.close()

    def end(self) -> None:
        """Kills it."""
        self.close()
        self.worker.tell(signal.SIGKILL)
        self.worker.wait(_UNKILLABLE_SECONDS)
        self.worker.close()


class Spares:
    """Keeps spares for all workers, made one after another once the workers train.

    Args:
        command: What every worker runs, the interpreter first.
        count: Number of spares; 0: none.
    """

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command, self._count = command, count
        self._waiting: list[_Spare] = []
        self._hired: list[_Spare] = []
        self._deaths = 0

    @property
    def pids(self) -> set[int]:
        """The process ids of those that wait."""
        return {spare.worker.pid for spare in self._waiting}

    def hire(self, rank: int, environ: Mapping[str, str]) -> WorkerProcess:
        """Starts a worker, in a spare where one waits.

        Args:
            rank: The worker's rank.
            environ: Its whole environment.

        Raises:
            OSError: If the system has no room for another process.
        """
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.become(rank, environ):
                self._hired.append(spare)
                return spare.worker
            self._bury(spare)
        return WorkerProcess(rank, self._command, environ)

    def refill(self, environ: Mapping[str, str]) -> None:
        """Makes the next spare where one is missing and the former is warm; does nothing otherwise.

        Args:
            environ: The environment of a worker. What differs between workers and attempts is replaced later.
        """
        for spare in [spare for spare in self._waiting if spare.worker.reap() is not None]:
            self._waiting.remove(spare)
            self._bury(spare)
        if len(self._waiting) >= self._count or self._deaths >= _MAX_DEATHS:
            return
        if self._waiting and not self._waiting[-1].is_warm:
            return
        base = {name: value for name, value in environ.items() if name not in ("TF_CONFIG", "TFDIST_ATTEMPT")}
        try:
            spare = _Spare(self._command, base)
        except OSError:  # no room: the next attempt starts cold
            self._deaths += 1
            return
        self._waiting.append(spare)

    def end(self) -> None:
        """Kills those that wait."""
        while self._waiting:
            self._waiting.pop().end()
        self.let_go()

    def let_go(self) -> None:
        """Closes the connections to those that are workers, when these have ended."""
        while self._hired:
            self._hired.pop().close()

    def _bury(self, spare: _Spare) -> None:
        self._deaths += 1
        spare.end()
