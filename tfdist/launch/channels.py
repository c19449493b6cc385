"""What comes from the processes of an attempt: their output, their heartbeats, and their ends."""

import array
import fcntl
import os
import selectors
import termios
import time
from collections.abc import Callable

from tfdist.launch.output import WorkerOutput
from tfdist.launch.worker_process import WorkerProcess

_PIECE_BYTES = 65_536


class Channels:
    """The descriptors that an attempt waits for, and the outputs behind them.

    Args:
        hear: Called with a worker when heartbeats of it have come.
    """

    def __init__(self, hear: Callable[[WorkerProcess], None]) -> None:
        self._hear = hear
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[int, WorkerOutput] = {}

    @property
    def is_pending(self) -> bool:
        """Whether an unfinished line waits to be shown."""
        return any(output.is_pending for output in self._outputs.values())

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Calls back when something else can be read."""
        self._selector.register(fd, selectors.EVENT_READ, on_ready)

    def forget(self, fd: int) -> None:
        """Waits no more for what `watch` has named; it may be closed already."""
        self._selector.unregister(fd)

    def add(self, worker: WorkerProcess, output: WorkerOutput) -> None:
        """Begins to wait for a worker, in the place of the former one of its rank."""
        self._outputs[worker.rank] = output
        for fd, is_error in worker.streams.items():
            self._selector.register(fd, selectors.EVENT_READ, (worker, is_error))
        self._selector.register(worker.heartbeats, selectors.EVENT_READ, lambda: self._hear(worker))
        if worker.pidfd is not None:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    def wait(self, seconds: float | None, on_end: Callable[[WorkerProcess], None]) -> None:
        """Waits until something comes, and passes it on.

        Args:
            seconds: The longest time; None: until something comes.
            on_end: Called with those that have ended, in the order in which they did.
        """
        for key, _ in self._selector.select(seconds):
            if self._selector.get_map().get(key.fd) is not key:
                continue  # what came before it has ended this one: a worker and its output may end at the same time
            if isinstance(key.data, WorkerProcess):
                on_end(key.data)
            elif isinstance(key.data, tuple):
                self._read(key.fd, *key.data)
            else:
                key.data()

    def finish(self, worker: WorkerProcess) -> tuple[str, ...]:
        """Passes on what a worker that has ended had still written, and returns its last lines."""
        for source in (worker.heartbeats, worker.pidfd):
            if source is not None:
                self._selector.unregister(source)
        self.drain(worker)
        return self._outputs[worker.rank].last_lines

    def drain(self, worker: WorkerProcess) -> None:
        """Passes on what can be read of its output now, and not what others go on to write there without an end."""
        for fd, is_error in worker.streams.items():
            left = _waiting_bytes(fd) if fd in self._selector.get_map() else 0
            while left > 0 and (taken := self._read(fd, worker, is_error)):
                left -= taken
        self._outputs[worker.rank].flush(now=time.monotonic())

    def remove(self, worker: WorkerProcess) -> None:
        """Waits no more for the output of what a finished worker has left behind."""
        for fd in worker.streams:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    def show_unfinished(self, *, now: float) -> None:
        """Shows unfinished lines whose time has come."""
        for output in self._outputs.values():
            output.show_unfinished(now=now)

    def close(self) -> None:
        """Waits for nothing any more."""
        self._selector.close()

    def _read(self, fd: int, worker: WorkerProcess, is_error: bool) -> int:
        """Passes one piece of output on. Returns how long it was."""
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._selector.unregister(fd)
            return 0
        self._outputs[worker.rank].feed(data, is_error=is_error, now=time.monotonic())
        return len(data)


def _waiting_bytes(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
