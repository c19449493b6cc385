"""What the launcher waits for, where several things come at once."""

import contextlib
import os

import pytest

from tfdist.launch.channels import Channels
from tfdist.launch.worker_process import WorkerProcess


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
    channels = Channels(heard.append)
    channels.add(worker, output)
    os.write(pipes[2][1], b"said")
    for index in order:  # the first that is ready is the first that is told
        os.close(pipes[index][1])
    ended = []

    def on_end(who):
        ended.append((who, channels.finish(who)))

    for _ in range(3):
        channels.wait(0, on_end)
    assert ended == [(worker, ("the last",))] and output.fed == b"said"
    channels.close()


def test_what_others_go_on_to_write_is_not_read_without_an_end(pipes):
    """A child of the worker has its output, too, and writes faster than it is passed on."""
    worker = EndedWorker([reading for reading, _ in pipes])
    for fd in worker.streams:
        os.set_blocking(fd, False)

    class Endless(Output):
        def feed(self, data, *, is_error, now):
            super().feed(data, is_error=is_error, now=now)
            assert len(self.fed) < 1000, "it reads on and on"
            os.write(pipes[2][1], b"more")

    output, channels = Endless(), Channels(lambda worker: None)
    channels.add(worker, output)
    os.write(pipes[2][1], b"said")
    channels.finish(worker)
    assert output.fed == b"said"
    channels.close()
