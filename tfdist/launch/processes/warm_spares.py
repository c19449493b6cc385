"""Warm spares: processes that have imported TensorFlow and wait to become workers that are started again."""

import json
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfdist.launch.processes.worker_process import WorkerProcess, has_started

_PROGRAM = str(Path(__file__).with_name("warm_spare_main.py"))
_MAX_FAILURES = 3
_UNKILLABLE_SECONDS = 5.0


class _WarmSpare:
    """A process that waits."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._channel, spare_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel.setblocking(False)
        self._is_warm = False
        try:
            # The command begins with the interpreter.
            line = [command[0], _PROGRAM, str(spare_end.fileno()), *command[1:]]
            self.worker = WorkerProcess(-1, line, environ, pass_fds=(spare_end.fileno(),))
        except BaseException:
            self._channel.close()
            raise
        finally:
            spare_end.close()

    @property
    def is_warm(self) -> bool:
        if not self._is_warm:
            try:
                self._is_warm = bool(self._channel.recv(1))
            except OSError:
                pass
        return self._is_warm

    def become_worker(self, rank: int, environ: Mapping[str, str]) -> bool:
        """Turns it into a worker; returns False if it has exited."""
        self._channel.setblocking(True)
        try:
            self._channel.sendall(json.dumps(has_started(environ)).encode())
            self._channel.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        self.worker.rank = rank
        return True

    def close(self) -> None:
        """Closes the connection. Call this after the spare has read it: earlier, unread data would reset it."""
        self._channel.close()

    def kill(self) -> None:
        self.close()
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait(_UNKILLABLE_SECONDS)
        self.worker.close()


class WarmSpares:
    """Keeps spares for all workers, started one after another while the workers train."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command, self._count = command, count
        self._waiting: list[_WarmSpare] = []
        self._used: list[_WarmSpare] = []
        self._failures = 0

    @property
    def pids(self) -> set[int]:
        return {spare.worker.pid for spare in self._waiting}

    def start_worker(self, rank: int, environ: Mapping[str, str]) -> WorkerProcess:
        """Starts a worker, in a waiting spare if there is one."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.become_worker(rank, environ):
                self._used.append(spare)
                return spare.worker
            self._discard(spare)
        return WorkerProcess(rank, self._command, environ)

    def refill(self, environ: Mapping[str, str]) -> None:
        """Starts the next spare if one is missing and the previous one is warm.

        Variables that differ between workers and attempts are set later.
        """
        for spare in [spare for spare in self._waiting if spare.worker.reap() is not None]:
            self._waiting.remove(spare)
            self._discard(spare)
        if len(self._waiting) >= self._count or self._failures >= _MAX_FAILURES:
            return
        if self._waiting and not self._waiting[-1].is_warm:
            return
        base = {name: value for name, value in environ.items() if name not in ("TF_CONFIG", "TFDIST_ATTEMPT")}
        try:
            spare = _WarmSpare(self._command, base)
        except OSError:  # no room: the next attempt starts cold
            self._failures += 1
            return
        self._waiting.append(spare)

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop().kill()
        self.close_connections()

    def close_connections(self) -> None:
        """Closes the connections to the spares that became workers. Call this when these have exited."""
        while self._used:
            self._used.pop().close()

    def close_connection(self, worker: WorkerProcess) -> None:
        """Closes the connection to a worker that has exited, if it was a spare."""
        for spare in [spare for spare in self._used if spare.worker is worker]:
            self._used.remove(spare)
            spare.close()

    def _discard(self, spare: _WarmSpare) -> None:
        self._failures += 1
        spare.kill()
