"""Waits for output, heartbeats and exits of the worker processes, and dispatches them."""

import array
import fcntl
import functools
import os
import selectors
import termios
import time
from collections.abc import Callable

from tfdist.launch.processes.output import WorkerOutput
from tfdist.launch.processes.worker_process import WorkerProcess

_READ_BYTES = 65_536


class EventLoop:
    """The file descriptors that an attempt waits for, and the outputs that they feed."""

    def __init__(self, on_heartbeat: Callable[[WorkerProcess], None], on_exit: Callable[[WorkerProcess], None]) -> None:
        self._on_heartbeat, self._on_exit = on_heartbeat, on_exit
        self._selector = selectors.DefaultSelector()
        self._outputs: dict[int, WorkerOutput] = {}

    @property
    def is_pending(self) -> bool:
        """Whether an unfinished line waits to be shown."""
        return any(output.is_pending for output in self._outputs.values())

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Calls `on_ready` whenever another descriptor can be read."""
        self._selector.register(fd, selectors.EVENT_READ, on_ready)

    def unwatch(self, fd: int) -> None:
        """Stops waiting for a descriptor of `watch`. It may be closed already."""
        self._selector.unregister(fd)

    def add(self, worker: WorkerProcess, output: WorkerOutput) -> None:
        """Starts to wait for a worker. It replaces the former worker of its rank."""
        self._outputs[worker.rank] = output
        for fd, is_error in worker.streams.items():
            self._selector.register(fd, selectors.EVENT_READ, functools.partial(self._read, fd, worker, is_error))
        self._selector.register(worker.heartbeats, selectors.EVENT_READ, lambda: self._on_heartbeat(worker))
        if worker.pidfd is not None:
            self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._on_exit(worker))

    def wait(self, seconds: float | None) -> None:
        """Waits for events, at most so many seconds, and dispatches them in the order in which they happened."""
        for key, _ in self._selector.select(seconds):
            # An earlier event may have removed it: a worker and its output may end at the same time.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def finish(self, worker: WorkerProcess) -> tuple[str, ...]:
        """Passes on the remaining output of a worker that has exited, and returns its last lines."""
        for source in (worker.heartbeats, worker.pidfd):
            if source is not None:
                self._selector.unregister(source)
        self.drain(worker)
        return self._outputs[worker.rank].last_lines

    def drain(self, worker: WorkerProcess) -> None:
        """Passes on the output that can be read now, but not what its children continue to write."""
        for fd, is_error in worker.streams.items():
            unread_bytes = _readable_bytes(fd) if fd in self._selector.get_map() else 0
            while unread_bytes > 0 and (size := self._read(fd, worker, is_error)):
                unread_bytes -= size
        self._outputs[worker.rank].flush(now=time.monotonic())

    def remove(self, worker: WorkerProcess) -> None:
        """Stops waiting for the output of processes that an exited worker left behind."""
        for fd in worker.streams:
            if fd in self._selector.get_map():
                self._selector.unregister(fd)

    def show_unfinished(self, *, now: float) -> None:
        for output in self._outputs.values():
            output.show_unfinished(now=now)

    def close(self) -> None:
        self._selector.close()

    def _read(self, fd: int, worker: WorkerProcess, is_error: bool) -> int:
        """Passes one piece of output on and returns its size in bytes."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._selector.unregister(fd)
            return 0
        self._outputs[worker.rank].feed(data, is_error=is_error, now=time.monotonic())
        return len(data)


def _readable_bytes(fd: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]
