"""Workers that are killed, frozen, that leave, or call something else: all others raise one error that names them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from worker_groups import free_addresses

ROOT = Path(__file__).parents[2]
WORKER = """
import os, signal, sys, time
import numpy as np
from tfdist.exchange.worker_exchange import STEPS, Exchange

rank, fault, shares_memory, *addresses = sys.argv[1:]
exchange = Exchange(int(rank), addresses, token="t", silence_seconds=2.0, shares_memory=shares_memory == "memory")
channel, values = exchange.channel(STEPS), np.ones(1_000_000, np.float32)
for step in range(200):
    if step == 5 and fault == "suspend":
        print("trains", flush=True)
        sys.stdin.readline()  # the control connections are served meanwhile
    elif step == 5 and rank != "2":
        exchange.control.publish(f"begins/{rank}", "")
    elif step == 5:
        for other in range(2):
            assert exchange.control.wait_for(f"begins/{other}", 30) is not None
        time.sleep(0.5)  # then the others wait in the exchange
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
        return [worker.communicate(timeout=60)[0] for worker in workers[:2]] + [_read_first_line(workers[2])]


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
    before = set(os.listdir("/dev/shm"))
    began = time.time()
    *survivors, lost = run_workers(fault, links)
    assert lost.startswith("fault")
    for printed in survivors:
        assert printed.startswith(error) and cause in printed, printed
        assert float(printed.split()[1]) >= began
    assert set(os.listdir("/dev/shm")) <= before


def test_workers_that_are_all_suspended_continue() -> None:
    """As `scontrol suspend` does. What the others have sent meanwhile is unread: it must not count as their silence."""
    with started_workers("suspend", "memory") as workers:
        assert [_read_first_line(worker) for worker in workers] == ["trains\n"] * 3
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for worker in workers:
                worker.send_signal(number)
            time.sleep(3.0 if number == signal.SIGSTOP else 0)  # longer than the silence after which one is lost
        for worker in workers:
            print(file=worker.stdin, flush=True)
        assert [worker.communicate(timeout=60)[0] for worker in workers] == ["done\n"] * 3
