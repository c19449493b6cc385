"""Workers that are killed, frozen, that leave, or call something else: all others raise one error that names them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from worker_groups import free_addresses

from tfdist.exchange.group_failure import GroupFailure

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
    if step == 5 and rank == "2":
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
"""


def run_workers(fault: str, links: str) -> list[str]:
    """Starts three workers, of which the last has a fault, and returns what each printed."""
    addresses = free_addresses(3)
    commands: list[Sequence[str]] = [
        [sys.executable, "-c", WORKER, str(rank), fault, links, *addresses] for rank in range(3)
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands]
    try:
        return [worker.communicate(timeout=240)[0] for worker in workers[:2]] + [_read_first_line(workers[2])]
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait(10)
            assert worker.stdout is not None
            worker.stdout.close()


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


def test_a_link_may_be_found_closed_before_the_farewell_is_read() -> None:
    """Another thread reads it, which may have to wait for a core."""
    failure = GroupFailure()
    reader = threading.Timer(0.5, failure.left.add, [1])
    reader.start()
    failure.lost_link(1, "its process has ended")
    reader.join()
    assert "it has ended its training" in str(failure.error)
