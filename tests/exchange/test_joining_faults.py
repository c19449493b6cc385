"""Workers that are lost, replaced or started twice while others still join; strangers who repeat what they heard."""

import contextlib
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from worker_groups import free_addresses, on_workers

from tfdist.exchange import group_listener, joining
from tfdist.exchange.exchange_errors import WorkerLostError
from tfdist.exchange.joining import CONTROL, GroupJoin
from tfdist.exchange.worker_exchange import CHANNELS, STEPS, Exchange
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import HandshakeError

LIMIT_SECONDS = 30.0


def in_thread(results: dict[int, Any], rank: int, addresses: list[str], timeout_seconds: float) -> threading.Thread:
    def join() -> None:
        try:
            results[rank] = Exchange(rank, addresses, token="t", timeout_seconds=timeout_seconds)
        except Exception as error:
            results[rank] = error

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    return thread


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "the worker does not listen"
            time.sleep(0.01)


class Process:
    """A worker's process up to its connections for some purposes with worker 0, over sockets."""

    def __init__(self, rank: int, addresses: list[str]) -> None:
        self._join = GroupJoin(
            rank,
            addresses,
            Credentials("tfdist exchange", 1, "t", same_version=True),
            CHANNELS,
            shares_memory=False,
        )
        self._address = addresses[0]
        self._connections: list[Any] = []

    def open(self, *purposes: str) -> None:
        for purpose in purposes:
            self._connections.append(self._join._open(connect(self._address), 0, purpose)[0])

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def test_a_worker_that_is_replaced_while_it_joins_leaves_no_link_behind() -> None:
    """The new process must not exchange gradients over the link of another one."""
    addresses, results = free_addresses(2), {}
    thread = in_thread(results, 0, addresses, LIMIT_SECONDS)
    killed = Process(1, addresses)
    killed.open(CONTROL, STEPS)
    killed.close()
    second = Exchange(1, addresses, token="t", timeout_seconds=LIMIT_SECONDS)
    thread.join(LIMIT_SECONDS)
    pair = [results[0], second]
    sums = on_workers(2, lambda rank: pair[rank].channel(STEPS).all_reduce(np.full(9, rank + 1.0)))
    assert all((total == 3.0).all() for total in sums)
    on_workers(2, lambda rank: pair[rank].close())


def test_a_connection_of_a_process_that_is_gone_does_not_count_as_a_second_one() -> None:
    """It may be read after its successor has joined."""

    class Connection:
        def __init__(self, is_open: bool) -> None:
            self.is_open = is_open

        def close(self) -> None:
            self.is_open = False

    join = GroupJoin(0, free_addresses(2), Credentials("tfdist exchange", 1, "t"), CHANNELS)
    joined = {}
    join._place(joining._Joined(1, CONTROL, "new", Connection(is_open=True)), joined)
    join._place(joining._Joined(1, STEPS, "old", Connection(is_open=False)), joined)
    assert list(joined) == [(1, CONTROL)] and joined[1, CONTROL].process == "new"
    with pytest.raises(HandshakeError, match="Two processes are worker 1"):
        join._place(joining._Joined(1, STEPS, "other", Connection(is_open=True)), joined)


def test_two_processes_that_are_one_worker_are_an_error_that_names_it() -> None:
    addresses, results = free_addresses(2), {}
    thread = in_thread(results, 0, addresses, LIMIT_SECONDS)
    processes = [Process(1, addresses) for _ in range(2)]
    processes[0].open(CONTROL, STEPS)
    processes[1].open(CONTROL)
    thread.join(LIMIT_SECONDS)
    assert isinstance(results[0], HandshakeError)
    assert "Two processes are worker 1" in str(results[0]), results[0]
    for process in processes:
        process.close()


def test_a_worker_that_is_started_again_before_all_have_joined_is_joined_again() -> None:
    """Worker 0 is replaced after worker 1 has joined it, while both wait for worker 2."""
    addresses, results = free_addresses(3), {}
    first = GroupJoin(0, addresses, Credentials("tfdist exchange", 1, "t", same_version=True), CHANNELS)
    first._listener.add("", first._take)
    first._listener.open()
    second = in_thread(results, 1, addresses, LIMIT_SECONDS)
    arrived = [first._joined.get(timeout=LIMIT_SECONDS) for _ in (CONTROL, *CHANNELS)]
    first._has_ended = True
    first._listener.close()
    for arrival in arrived:
        assert isinstance(arrival, joining._Joined)
        arrival.close()
    threads = [in_thread(results, rank, addresses, LIMIT_SECONDS) for rank in (0, 2)]
    for thread in (second, *threads):
        thread.join(LIMIT_SECONDS)
    assert all(isinstance(result, Exchange) for result in results.values()), results
    totals = on_workers(3, lambda rank: results[rank].channel(STEPS).all_reduce(np.full(9, rank + 1.0)))
    assert all((total == 6.0).all() for total in totals), totals
    on_workers(3, lambda rank: results[rank].close())


def test_a_worker_that_gives_up_does_not_dial_any_more() -> None:
    """What it still joined would be a connection to a worker that does not exist."""
    addresses = free_addresses(3)
    others = GroupJoin(0, addresses, Credentials("tfdist exchange", 1, "other", same_version=True), CHANNELS)
    others._listener.add("", others._take)
    others._listener.open()
    with pytest.raises(HandshakeError):  # of worker 0; worker 1 is dialed until then
        Exchange(2, addresses, token="t", timeout_seconds=LIMIT_SECONDS)
    host, _, port = addresses[1].rpartition(":")
    with socket.create_server((host, int(port))) as server:
        server.settimeout(1.0)
        with contextlib.suppress(TimeoutError):  # one that was on its way when the worker gave up
            server.accept()[0].close()
        with pytest.raises(TimeoutError), server.accept()[0]:
            pass
    others._has_ended = True
    others._listener.close()


def test_a_worker_that_is_lost_after_it_has_joined_is_named_by_those_who_wait_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And who raises that error leaves no connection behind, by which others would take it for a living worker."""
    addresses, results = free_addresses(2), {}
    waits, closed = threading.Event(), threading.Event()

    def noted(name: str, noted_in: threading.Event) -> None:
        method = getattr(Exchange, name)

        def call(self: Exchange, *arguments: Any, **options: Any) -> None:
            noted_in.set()
            method(self, *arguments, **options)

        monkeypatch.setattr(Exchange, name, call)

    noted("_wait_until_all_have_joined", waits)
    noted("close", closed)
    thread = in_thread(results, 0, addresses, LIMIT_SECONDS)
    lost = Process(1, addresses)
    lost.open(CONTROL, *CHANNELS)
    assert waits.wait(LIMIT_SECONDS)  # until worker 1 says that it has joined all others
    lost.close()
    thread.join(LIMIT_SECONDS)
    assert isinstance(results[0], WorkerLostError) and results[0].rank == 1
    assert closed.is_set()


def test_a_recorded_handshake_proves_nothing() -> None:
    """A stranger in the middle passes a worker's bytes on, and sends them again."""
    addresses = free_addresses(3)
    results: dict[int, Any] = {}
    thread = in_thread(results, 0, addresses, LIMIT_SECONDS)
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as middle:
        seen = [f"127.0.0.1:{middle.getsockname()[1]}", *addresses[1:]]

        def relay() -> None:
            dialing, _ = middle.accept()
            with dialing, connect(addresses[0]) as listening:
                while len(recorded) < 3 and (data := dialing.recv(4096)):
                    recorded.append(data)  # hello, proof, request, of which each has an answer
                    listening.sendall(data)
                    dialing.sendall(listening.recv(4096))

        threading.Thread(target=relay, daemon=True).start()
        worker = Process(2, seen)
        worker.open(CONTROL)
        assert len(recorded) == 3
        with connect(addresses[0]) as stranger:
            answers = []
            for data in recorded:
                try:
                    stranger.sendall(data)
                    answers.append(stranger.recv(4096))
                except ConnectionError:
                    answers.append(b"")
    assert b"nonce" in answers[0] and b"wrong token" in answers[1] and answers[2] == b""
    worker.close()
    rest = [in_thread(results, rank, addresses, LIMIT_SECONDS) for rank in (1, 2)]
    for started in (thread, *rest):
        started.join(LIMIT_SECONDS)
    on_workers(3, lambda rank: results[rank].close())


def test_workers_join_beside_a_flood_of_connections() -> None:
    """More than one address may have at a time: those of workers pass as the strangers' are closed."""
    addresses, results = free_addresses(2), {}
    thread = in_thread(results, 0, addresses, 60.0)
    ends, strangers = threading.Event(), []

    host, _, port = addresses[0].rpartition(":")

    def flood() -> None:
        while not ends.is_set():
            try:
                strangers.append(socket.create_connection((host, int(port)), timeout=5))
            except OSError:  # all have joined
                return
            if len(strangers) > 3 * group_listener._MAX_PENDING_PER_ADDRESS:
                strangers.pop(0).close()

    flooding = threading.Thread(target=flood, daemon=True)
    connect(addresses[0]).close()
    flooding.start()
    while len(strangers) < 2 * group_listener._MAX_PENDING_PER_ADDRESS:
        time.sleep(0.01)
    second = Exchange(1, addresses, token="t", timeout_seconds=60.0)
    ends.set()
    thread.join(60.0)
    pair = [results[0], second]
    sums = on_workers(2, lambda rank: pair[rank].channel(STEPS).all_reduce(np.full(9, rank + 1.0)))
    assert all((total == 3.0).all() for total in sums)
    on_workers(2, lambda rank: pair[rank].close())
    flooding.join(10)
    for stranger in strangers:
        stranger.close()
