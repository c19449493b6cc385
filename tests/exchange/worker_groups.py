"""Groups of workers as threads of one process, with real sockets, real shared memory and real handshakes."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.exchange.channel import Channel
from tfdist.exchange.exchange_errors import GroupFailure
from tfdist.exchange.links import SharedMemoryLink, SocketLink, WorkerLink
from tfdist.exchange.worker_exchange import Exchange
from tfdist.utils.cores_and_ports import ReservedPorts

LIMIT_SECONDS = 60.0


def on_workers(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Calls `body(rank)` in a thread for each rank; returns the results, or the exceptions that it raised."""
    results: list[Any] = [TimeoutError("the thread has not ended")] * size

    def call(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return results


@contextlib.contextmanager
def linked_channels(size: int, kind: str) -> Iterator[list[Channel]]:
    """Within this context `size` channels are linked by "sockets" or by "memory"."""
    links: list[list[WorkerLink | None]] = [[None] * size for _ in range(size)]
    for high in range(size):
        for low in range(high):
            links[high][low], links[low][high] = _linked(high, low, kind)
    channels = [Channel(rank, links[rank], GroupFailure()) for rank in range(size)]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


def _linked(high: int, low: int, kind: str) -> tuple[WorkerLink, WorkerLink]:
    if kind == "memory":
        memory, *counters = SharedMemoryLink.create()
        copies = [os.dup(descriptor) for descriptor in (memory, *counters)]  # each side closes its own
        return (
            SharedMemoryLink(low, memory, counters, is_creator=True),
            SharedMemoryLink(high, copies[0], copies[1:], is_creator=False),
        )
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return SocketLink(low, near), SocketLink(high, far)


def free_addresses(count: int, host: str = "127.0.0.1") -> list[str]:
    """Returns addresses whose ports are free, and are not given to connections of any program."""
    with ReservedPorts(count) as reserved:
        ports = reserved.ports
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for port in ports]


@contextlib.contextmanager
def joined(size: int, host: str = "127.0.0.1", **options: Any) -> Iterator[list[Exchange]]:
    """Within this context `size` workers of this process are joined."""
    addresses = free_addresses(size, host)
    options = {"token": "secret", "timeout_seconds": LIMIT_SECONDS, **options}
    exchanges = on_workers(size, lambda rank: Exchange(rank, addresses, **options))
    failed = [one for one in exchanges if isinstance(one, Exception)]
    if failed:
        raise failed[0]
    try:
        yield exchanges
    finally:
        on_workers(size, lambda rank: exchanges[rank].close())
