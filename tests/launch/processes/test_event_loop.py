"""The event loop with several events at once."""

import contextlib
import os

import pytest

from tfdist.launch.processes.event_loop import EventLoop
from tfdist.launch.processes.worker_process import WorkerProcess


class Output:
    last_lines = ("the last",)

    def __init__(self):
        self.fed = b""

    def feed(self, data, *, is_error, now):
        self.fed += data

    def flush(self, *, now):
        pass


class EndedWorker(WorkerProcess):
    """Its end, its output and a heartbeat can all be read."""

    def __init__(self, pipes):
        self.rank, self.pidfd, self.heartbeats = 0, pipes[0], pipes[1]
        self.streams = {pipes[2]: False, pipes[3]: True}


@pytest.fixture
def pipes():
    """Four pipes: the ends to read of a worker's end, heartbeats, output and errors, and those to write."""
    made = [os.pipe() for _ in range(4)]
    yield made
    for end in {end for pipe in made for end in pipe}:
        with contextlib.suppress(OSError):  # the test has closed it
            os.close(end)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_a_worker_and_its_output_end_at_once(pipes, order):
    worker, output, heard = EndedWorker([reading for reading, _ in pipes]), Output(), []
    for fd in worker.streams:
        os.set_blocking(fd, False)
    exits = []

    def on_exit(who):
        exits.append((who, loop.finish(who)))

    loop = EventLoop(heard.append, on_exit)
    loop.add(worker, output)
    os.write(pipes[2][1], b"said")
    for index in order:  # the first that is ready is the first that is told
        os.close(pipes[index][1])
    for _ in range(3):
        loop.wait(0)
    assert exits == [(worker, ("the last",))] and output.fed == b"said"
    loop.close()


def test_draining_ends_although_others_continue_to_write(pipes):
    """A child of the worker shares its output and writes faster than it is read."""
    worker = EndedWorker([reading for reading, _ in pipes])
    for fd in worker.streams:
        os.set_blocking(fd, False)

    class Endless(Output):
        def feed(self, data, *, is_error, now):
            super().feed(data, is_error=is_error, now=now)
            assert len(self.fed) < 1000, "draining does not end"
            os.write(pipes[2][1], b"more")

    output, loop = Endless(), EventLoop(lambda worker: None, lambda worker: None)
    loop.add(worker, output)
    os.write(pipes[2][1], b"said")
    loop.finish(worker)
    assert output.fed == b"said"
    loop.close()
