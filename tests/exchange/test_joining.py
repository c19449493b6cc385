"""Workers that join: complete groups, missing workers, strangers, encryption."""

import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from worker_groups import free_addresses, joined, on_workers

from tfdist.exchange import group_listener, joining
from tfdist.exchange.exchange_errors import WorkerLostError
from tfdist.exchange.group_listener import Encryption
from tfdist.exchange.links import SharedMemoryLink, SocketLink
from tfdist.exchange.worker_exchange import SMALL, STEPS, Exchange
from tfdist.transport.transport_errors import HandshakeError


def sums(exchanges: list[Exchange], channel: str = STEPS, count: int = 300_000) -> list[np.ndarray]:
    return on_workers(
        len(exchanges), lambda rank: exchanges[rank].channel(channel).all_reduce(np.full(count, rank + 1.0))
    )


def links_of(exchange: Exchange) -> set[type]:
    return {type(link) for link in exchange.channel(STEPS)._links.values()}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("shares_memory", [True, False])
def test_three_workers_exchange(host: str, shares_memory: bool) -> None:
    with joined(3, host, shares_memory=shares_memory) as exchanges:
        assert links_of(exchanges[0]) == {SharedMemoryLink if shares_memory else SocketLink}
        for channel in (STEPS, SMALL):
            assert all((result == 6.0).all() for result in sums(exchanges, channel))


def test_one_worker_needs_no_port() -> None:
    with joined(1) as exchanges:
        assert (sums(exchanges)[0] == 1.0).all()


def test_shared_memory_and_sockets_in_one_group() -> None:
    addresses = free_addresses(3)
    exchanges = on_workers(
        3, lambda rank: Exchange(rank, addresses, token="t", timeout_seconds=30, shares_memory=rank != 2)
    )
    assert links_of(exchanges[0]) == {SharedMemoryLink, SocketLink}
    assert all((result == 6.0).all() for result in sums(exchanges))
    on_workers(len(exchanges), lambda rank: exchanges[rank].close())


@pytest.mark.parametrize("fault", ["another user", "no memory", "another network namespace"])
def test_workers_of_one_host_that_cannot_share_memory_use_sockets(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def create() -> list[int]:
        raise OSError("Cannot allocate memory")

    if fault == "another user":
        monkeypatch.setattr(group_listener, "_user_of", lambda connection: os.getuid() + 1)
    elif fault == "no memory":
        monkeypatch.setattr(SharedMemoryLink, "create", create)
    else:
        opened = joining.GroupJoin._open_memory
        monkeypatch.setattr(joining.GroupJoin, "_open_memory", lambda *arguments: opened(*arguments[:-1], "absent"))
    with joined(2) as exchanges:
        assert links_of(exchanges[0]) == {SocketLink}
        assert all((result == 3.0).all() for result in sums(exchanges))


def test_no_port_is_open_after_all_have_joined() -> None:
    addresses = free_addresses(2)
    exchanges = on_workers(2, lambda rank: Exchange(rank, addresses, token="t"))
    for address in addresses:
        host, _, port = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)
    on_workers(len(exchanges), lambda rank: exchanges[rank].close())


def test_a_missing_worker_is_named() -> None:
    addresses = free_addresses(3)
    errors = on_workers(2, lambda rank: Exchange(rank, addresses, token="t", timeout_seconds=1.0))
    assert all(isinstance(error, TimeoutError) and f"worker 2 at {addresses[2]}" in str(error) for error in errors)


def test_a_port_in_use() -> None:
    addresses = free_addresses(2)
    with socket.create_server(("127.0.0.1", int(addresses[0].rpartition(":")[2]))):
        with pytest.raises(OSError, match="The port of this task is in use"):
            Exchange(0, addresses, token="t", timeout_seconds=1.0)


def test_another_token_is_refused() -> None:
    addresses = free_addresses(2)
    errors = on_workers(2, lambda rank: Exchange(rank, addresses, token=f"token {rank}", timeout_seconds=5.0))
    assert isinstance(errors[1], HandshakeError) and "the same TFDIST_TOKEN" in str(errors[1])
    assert isinstance(errors[0], TimeoutError)


def test_another_attempt_of_the_same_cluster_is_refused() -> None:
    addresses = free_addresses(2)
    errors = on_workers(
        2, lambda rank: Exchange(rank, addresses, token="t", cluster=f"attempt {rank}", timeout_seconds=5.0)
    )
    assert isinstance(errors[1], HandshakeError)


@pytest.mark.parametrize("sends", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 2000, b"\x00\x00\x00\x02{}", b""])
def test_strangers_do_no_harm(sends: bytes) -> None:
    """Garbage, a frame that claims four gigabytes, a message that is no hello, and half-open connections."""
    addresses = free_addresses(2)
    host, _, port = addresses[0].rpartition(":")
    results: list[Exchange] = []
    first = threading.Thread(target=lambda: results.append(Exchange(0, addresses, token="t")), daemon=True)
    first.start()
    strangers = []
    end = time.monotonic() + 30
    while len(strangers) < 20 and time.monotonic() < end:
        try:
            stranger = socket.create_connection((host, int(port)), timeout=5)
        except ConnectionRefusedError:
            continue  # the worker does not listen yet
        stranger.sendall(sends)
        strangers.append(stranger)
    second = Exchange(1, addresses, token="t", timeout_seconds=30)
    first.join(30)
    assert all((result == 3.0).all() for result in sums([results[0], second]))
    for stranger in strangers:
        stranger.close()
    for exchange in (results[0], second):
        exchange.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a certificate of it, and one of another authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command, which makes certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    for name in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem",
                "-subj", f"/CN={name}", "-days", "2")  # fmt: skip
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"worker-{name}.key", "-out", f"{name}.csr",
                "-subj", "/CN=worker")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}.pem", "-CAkey", f"{name}.key",
                "-CAcreateserial", "-out", f"worker-{name}.pem", "-days", "2")  # fmt: skip
    return folder


def encryption(folder: Path, name: str) -> Encryption:
    return Encryption(str(folder / f"worker-{name}.pem"), str(folder / f"worker-{name}.key"), str(folder / "ca.pem"))


def test_encrypted_workers_exchange(certificates: Path) -> None:
    with joined(3, shares_memory=False, encryption=encryption(certificates, "ca")) as exchanges:
        assert all((result == 6.0).all() for result in sums(exchanges))


def test_an_encrypted_connection_is_read_and_written_at_once(certificates: Path) -> None:
    """By the thread that answers, and by those that publish: OpenSSL's connections are not safe in two threads."""
    with joined(2, shares_memory=False, encryption=encryption(certificates, "ca")) as exchanges:

        def publish_and_wait(rank: int) -> str | None:
            for number in range(3000):
                exchanges[rank].control.publish(f"{rank}/{number}", "published")
            return exchanges[rank].control.wait_for(f"{1 - rank}/2999", 30)

        assert on_workers(2, publish_and_wait) == ["published"] * 2
        assert [exchange.failure for exchange in exchanges] == [None] * 2


def test_a_certificate_of_another_authority_is_refused(certificates: Path) -> None:
    addresses = free_addresses(2)
    names = ("ca", "other")
    errors = on_workers(
        2,
        lambda rank: Exchange(
            rank, addresses, token="t", timeout_seconds=2.0, encryption=encryption(certificates, names[rank])
        ),
    )
    assert all(isinstance(error, TimeoutError) for error in errors)


def test_all_workers_find_the_proposal_that_was_first() -> None:
    """All propose at once, as at a preemption; an agreement must be the same on all."""
    with joined(3) as exchanges:
        for turn in range(20):
            found = on_workers(3, lambda rank, turn=turn: exchanges[rank].control.propose(f"{turn}", f"step {rank}"))
            assert len(set(found)) == 1 and found[0].startswith("step ")


def test_a_value_that_a_worker_will_not_publish_any_more_is_an_error() -> None:
    with joined(3) as exchanges:
        exchanges[1].control.publish("published", "before it left")
        exchanges[1].close()
        for rank in (0, 2):
            assert exchanges[rank].control.wait_for("published") == "before it left"
        errors = on_workers(3, lambda rank: None if rank == 1 else exchanges[rank].control.wait_for("never"))
        for rank in (0, 2):
            assert isinstance(errors[rank], WorkerLostError) and errors[rank].rank == 1
            assert exchanges[rank].failure is None  # who does not wait is not disturbed


def test_values_of_others_may_arrive_after_a_worker_has_left() -> None:
    with joined(3) as exchanges:

        def body(rank: int) -> str | None:
            if rank == 0:
                return exchanges[0].control.wait_for("late")
            if rank == 1:
                exchanges[1].close()
                return None
            end = time.monotonic() + 30
            while not exchanges[0].control._failure.left and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.3)  # in which a worker that gave up would raise its error
            exchanges[2].control.publish("late", "value")
            return None

        assert on_workers(3, body) == ["value", None, None]


def test_a_name_that_stands_for_loopback_does_not_hide_the_worker_from_other_hosts() -> None:
    with group_listener._server("localhost", 0) as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")
    with group_listener._server(socket.gethostname(), 0) as server:
        assert server.getsockname()[0] in ("0.0.0.0", "::")


def test_descriptors_are_closed() -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    with joined(2):
        pass
    before = opened()
    for _ in range(3):
        with joined(2):
            pass
    end = time.monotonic() + 30
    while opened() > before + 6:  # the counters of failures, which threads may still poll
        assert time.monotonic() < end, (before, opened())
        time.sleep(0.01)
