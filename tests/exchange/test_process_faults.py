"""What a program does beside its exchanges: forks, closed exchanges, warnings as errors, messages that mean nothing."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from worker_groups import free_addresses, joined, linked_channels, on_workers

from tfdist.exchange import group_listener
from tfdist.exchange.exchange_errors import ExchangeError, WorkerLostError
from tfdist.exchange.worker_exchange import STEPS, Exchange

ROOT = Path(__file__).parents[2]
# A worker whose forked child, as those of `PyDataset(use_multiprocessing=True)`, lives longer than it.
FORKING_WORKER = """
import os, signal, sys, time
from tfdist.exchange.group_listener import Encryption
from tfdist.exchange.worker_exchange import Exchange

exchange = Exchange(1, sys.argv[1:3], token="t", shares_memory=sys.argv[3] == "memory")
child = os.fork()
if child == 0:
    time.sleep(300)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("links", ["memory", "sockets"])
def test_a_killed_worker_is_noticed_though_a_forked_child_of_it_lives(links: str) -> None:
    addresses = free_addresses(2)
    worker = subprocess.Popen(
        [sys.executable, "-c", FORKING_WORKER, *addresses, links],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    exchange = Exchange(0, addresses, token="t", shares_memory=links == "memory", silence_seconds=600.0)
    child = int(worker.stdout.readline())
    try:
        print(file=worker.stdin, flush=True)
        worker.wait(30)
        poller = select.poll()
        poller.register(exchange._failure.descriptor, select.POLLIN)
        assert poller.poll(20_000), "the lost worker is not noticed"
        assert isinstance(exchange.failure, WorkerLostError) and exchange.failure.cause == "its process has ended"
    finally:
        os.kill(child, signal.SIGKILL)
        worker.kill()
        worker.wait(30)
        worker.stdin.close()
        worker.stdout.close()
        exchange.close()


@pytest.mark.parametrize("links", ["memory", "sockets"])
def test_a_forked_child_does_not_disturb_the_exchange(links: str) -> None:
    with joined(2, shares_memory=links == "memory") as exchanges:
        if (child := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        totals = on_workers(2, lambda rank: exchanges[rank].channel(STEPS).all_reduce(np.full(70_000, rank + 1.0)))
        assert all((total == 3.0).all() for total in totals)


def test_a_channel_that_is_closed_during_an_exchange_takes_no_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdist.exchange.channel._CLOSE_SECONDS", 0.01)
    with linked_channels(2, "sockets") as channels:
        waiting = threading.Thread(target=on_workers, args=(1, lambda _: channels[0].all_reduce(np.ones(5))))
        waiting.start()
        while not channels[0]._lock.locked():
            time.sleep(0.001)
        channels[0].close()
        channels[1].all_reduce(np.ones(5))
        waiting.join()
        (error,) = on_workers(1, lambda _: channels[0].all_reduce(np.ones(5)))
        assert isinstance(error, ExchangeError) and "is closed" in str(error)


def test_a_fork_may_find_a_link_closed() -> None:
    with linked_channels(2, "sockets") as [channel, _]:
        channel.close()
        channel.close_in_fork()


def test_programs_that_a_worker_starts_do_not_inherit_the_shared_memory() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with joined(2):
        inherited = []
        for descriptor in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(OSError):  # it is closed by now
                if os.get_inheritable(int(descriptor)):
                    inherited.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    assert inherited == []


@pytest.mark.parametrize("kind", ["memory", "sockets"])
def test_an_exchange_after_its_channel_was_closed_is_an_error(kind: str) -> None:
    """A program may still use an old strategy after new ones have connected the workers again."""
    with linked_channels(2, kind) as channels:
        channels[0].close()
        (error,) = on_workers(1, lambda _: channels[0].all_reduce(np.ones(5)))
        assert isinstance(error, ExchangeError) and "all-reduce 0 of 5 float64 values" in str(error)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_overflows_and_bad_numbers_are_no_warnings(dtype: str) -> None:
    """With loss scaling an overflow is ordinary, and TensorFlow says nothing; a program may make warnings errors."""
    values = np.array([np.finfo(dtype).max, np.inf, -np.inf, np.nan, 1.0], dtype)

    def add(rank: int) -> np.ndarray:
        return channels[rank].all_reduce(np.concatenate([values if rank else -values[::-1], values]))

    with linked_channels(2, "sockets") as channels, warnings.catch_warnings():
        warnings.simplefilter("error")
        results = on_workers(2, add)
    assert all(isinstance(result, np.ndarray) for result in results), results
    assert all(result[5] == np.inf and np.isnan(result[2]) and result[9] == 2.0 for result in results)
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize(
    "message", [{"lost": "nobody", "cause": "x"}, {"calls": 7}, {"propose": "x"}, {"stalled": "steps"}, {"late": None}]
)
def test_a_control_message_that_means_nothing_loses_its_sender(message: dict) -> None:
    with joined(2) as exchanges:
        exchanges[1].control._send_to_all(message)
        poller = select.poll()
        poller.register(exchanges[0]._failure.descriptor, select.POLLIN)
        assert poller.poll(20_000), "the message is not noticed"
        error = exchanges[0].failure
        assert isinstance(error, WorkerLostError) and error.rank == 1 and "not part of an exchange" in error.cause


def test_bytes_that_are_no_header_lose_their_sender() -> None:
    """As a frame that claims 2**60 bytes: a channel reads as many bytes as its own call needs, whatever is claimed."""
    with joined(2, shares_memory=False) as exchanges:
        link = exchanges[1].channel(STEPS)._links[0]
        assert link.send(memoryview(b"tfdx" + bytes([255]) + (2**60).to_bytes(8, "big") * 20))
        (error,) = on_workers(1, lambda _: exchanges[0].channel(STEPS).all_reduce(np.ones(5)))
        assert isinstance(error, WorkerLostError) and error.rank == 1 and "not part of an exchange" in error.cause


def test_a_half_closed_link_loses_its_worker() -> None:
    with joined(2, shares_memory=False) as exchanges:
        exchanges[1].channel(STEPS)._links[0]._socket.shutdown(socket.SHUT_WR)
        (error,) = on_workers(1, lambda _: exchanges[0].channel(STEPS).all_reduce(np.ones(100_000)))
        assert isinstance(error, WorkerLostError) and error.rank == 1


def test_a_worker_listens_on_a_link_local_address() -> None:
    """Which counts only with its interface."""
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    local = [line for line in lines if line[3] == "20"]
    if not local:
        pytest.skip("needs an interface with an IPv6 address of its link")
    digits, *_, interface = local[0]
    address = ":".join(digits[start : start + 4] for start in range(0, 32, 4))
    with group_listener._server(f"{address}%{interface}", 0) as server:
        port = server.getsockname()[1]
        with socket.create_connection((f"{address}%{interface}", port), timeout=5):
            pass
