"""Workers that are killed, frozen, that leave, or call something else: all others raise one error that names them."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from worker_groups import free_addresses

from tfdist.exchange.exchange_errors import GroupFailure

ROOT = Path(__file__).parents[2]
WORKER = """
import os, select, signal, sys, time
from pathlib import Path
import numpy as np
from tfdist.exchange.worker_exchange import STEPS, Exchange

rank, fault, shares_memory, *addresses = sys.argv[1:]
exchange = Exchange(int(rank), addresses, token="t", silence_seconds=5.0, shares_memory=shares_memory == "memory")
channel, values = exchange.channel(STEPS), np.ones(1_000_000, np.float32)

def wait_for_data(link):
    "Waits until the other worker sends: it is in the exchange then."
    poller = select.poll()
    for descriptor, events in link.interests(sends=False, receives=True):
        poller.register(descriptor, events)
    assert getattr(link, "_full", 0) or poller.poll(30_000)

for step in range(200):
    if step == 5:  # what has no name there cannot be left there
        assert "/dev/shm/" not in Path("/proc/self/maps").read_text()
    if step == 5 and fault == "suspend":
        print("trains", flush=True)
        if rank == "0":  # what it waits for comes while it is stopped, for longer than it waits
            assert exchange.control.wait_for("news", 5.0) == "good"
        if rank == "2":  # is in an exchange with a limit, which is shorter, too
            channel.before_next(step, 6.0)
        else:
            sys.stdin.readline()  # the control connections are served meanwhile
        if rank == "1":
            exchange.control.publish("news", "good")
            print("published", flush=True)
            sys.stdin.readline()
    elif step == 5 and rank == "2":
        for link in channel._links.values():
            wait_for_data(link)
        print("fault", time.time(), flush=True)
        if fault == "leave":
            break
        if fault == "gather":
            channel.all_gather(values)
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    try:
        total = channel.all_reduce(values)
    except Exception as error:
        print(type(error).__name__, time.time(), error, flush=True)
        os._exit(3)
    assert (total == len(addresses)).all()
exchange.close()
print("done", flush=True)
"""


@contextlib.contextmanager
def started_workers(fault: str, links: str) -> Iterator[list[subprocess.Popen]]:
    """Starts three workers, of which the last has a fault; kills them at the end."""
    addresses = free_addresses(3)
    commands: list[Sequence[str]] = [
        [sys.executable, "-c", WORKER, str(rank), fault, links, *addresses] for rank in range(3)
    ]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [subprocess.Popen(command, env=environment, **options) for command in commands]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait(10)
            assert worker.stdin is not None and worker.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
            worker.stdout.close()


def run_workers(fault: str, links: str) -> list[str]:
    """Starts three workers, of which the last has a fault, and returns what each printed."""
    with started_workers(fault, links) as workers:
        return [worker.communicate(timeout=240)[0] for worker in workers[:2]] + [_read_first_line(workers[2])]


def _read_first_line(worker: subprocess.Popen) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline()


@pytest.mark.parametrize("links", ["memory", "sockets"])
@pytest.mark.parametrize(
    ("fault", "error", "cause"),
    [
        ("kill", "WorkerLostError", "Worker 2 is lost. Received: its process has ended, during all-reduce 5 of"),
        ("freeze", "WorkerLostError", "Worker 2 is lost. Received: it has not answered for"),
        ("leave", "WorkerLostError", "Worker 2 is lost. Received: it has ended its training"),
        ("gather", "ExchangeMismatchError", "worker 2: all-gather 5 of 1000000 float32 values"),
    ],
)
def test_every_other_worker_raises_one_error(fault: str, error: str, cause: str, links: str) -> None:
    began = time.time()
    *survivors, lost = run_workers(fault, links)
    assert lost.startswith("fault")
    for printed in survivors:
        assert printed.startswith(error) and cause in printed, printed
        assert float(printed.split()[1]) >= began


def test_workers_that_are_all_suspended_continue() -> None:
    """As `scontrol suspend` does. What the others have sent meanwhile is unread: it must not count as their silence."""
    with started_workers("suspend", "memory") as workers:
        assert [_read_first_line(worker) for worker in workers] == ["trains\n"] * 3
        workers[0].send_signal(signal.SIGSTOP)
        print(file=workers[1].stdin, flush=True)
        assert _read_first_line(workers[1]) == "published\n"
        for worker in workers[1:]:
            worker.send_signal(signal.SIGSTOP)
        time.sleep(6.5)  # longer than the silence after which one is lost
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
        for worker in workers[:2]:
            print(file=worker.stdin, flush=True)
        assert [worker.communicate(timeout=240)[0] for worker in workers] == ["done\n"] * 3


def test_a_link_may_be_found_closed_before_the_farewell_is_read() -> None:
    """Another thread reads it, which may have to wait for a core."""
    failure = GroupFailure()
    reader = threading.Timer(0.5, failure.left.add, [1])
    reader.start()
    failure.lost_link(1, "its process has ended")
    reader.join()
    assert "it has ended its training" in str(failure.error)
