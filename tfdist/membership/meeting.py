"""How a worker finds the others: it begins with all of them, or they train already, and it joins them."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.group_listener import Encryption, GroupListener, Request, ask
from tfdist.exchange.joining import GroupJoin
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import TransportError
from tfdist.utils.cores_and_ports import host_and_port

_GROUP = "membership"
_FIRST_GROUP = "membership of the first view"
_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
_CONNECT_SECONDS = 5.0


class _OthersTrainError(Exception):
    pass


class Meeting:
    """Connects a worker with others for the membership, for as long as it lives.

    Between two workers the younger one, which has the larger number, opens the connection.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank.
        listener: What listens on the address of this worker.
        credentials: What both sides of a connection prove.
        encryption: Encrypts connections between hosts, if given.
        trains: Whether this worker is one of those that train.
        has_lost: Whether it trains without any worker of a rank.
        offer: What a worker that joins gets to know from one that trains.
        take: Called with the number of another worker and the connection to it, on any thread.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        listener: GroupListener,
        credentials: Credentials,
        *,
        encryption: Encryption | None,
        trains: Callable[[], bool],
        has_lost: Callable[[int], bool],
        offer: Callable[[], Mapping[str, Any]],
        take: Callable[[int, NonblockingConnection, Mapping[str, Any]], None],
    ) -> None:
        self._rank, self._addresses = rank, list(addresses)
        self._listener, self._credentials, self._encryption = listener, credentials, encryption
        self._trains, self._has_lost, self._offer, self._take = trains, has_lost, offer, take
        self._number: int | None = None  # None: it is not decided whether this worker begins or joins
        self._dialed: set[int] = set()
        self._is_over = threading.Event()
        listener.add(_GROUP, self._answer)

    def begin(self, timeout_seconds: float) -> dict[int, NonblockingConnection] | None:
        """Begins with all others; returns the connections to them, by rank, or `None` if others train already.

        Raises:
            TimeoutError, OSError, HandshakeError: See `Exchange`.
        """
        self._listener.open()
        join = GroupJoin(
            self._rank,
            self._addresses,
            self._credentials,
            (),
            group=_FIRST_GROUP,
            listener=self._listener,
            encryption=self._encryption,
        )
        is_decided = threading.Event()
        for peer in self._other_ranks():
            self._start(self._probe, peer, join, is_decided)
        try:
            connections = dict(join.join(timeout_seconds).control)
        except _OthersTrainError:
            return None
        finally:
            is_decided.set()
        return connections

    def accept(self, number: int) -> None:
        """Takes in connections of younger workers from now on, as a worker with a number."""
        self._number = number

    def join(self, number: int) -> None:
        """Connects with all workers that there are, and with those that come later, under a number."""
        self.accept(number)
        for peer in self._other_ranks():
            self._start_dialing(peer)

    def close(self) -> None:
        """Ends the threads."""
        self._is_over.set()
        self._listener.remove(_GROUP)

    def _other_ranks(self) -> list[int]:
        return [rank for rank in range(len(self._addresses)) if rank != self._rank]

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=target, args=arguments, name="tfdist membership", daemon=True).start()

    def _ask(self, rank: int, message: dict[str, Any]) -> tuple[BlockingConnection, dict[str, Any]]:
        connection = socket.create_connection(host_and_port(self._addresses[rank]), _CONNECT_SECONDS)
        return ask(connection, self._credentials, {**message, "group": _GROUP}, encryption=self._encryption)

    def _probe(self, peer: int, join: GroupJoin, is_decided: threading.Event) -> None:
        while not is_decided.is_set():
            with contextlib.suppress(TransportError, OSError):
                connection, answer = self._ask(peer, {"asks": self._rank})
                connection.close()
                if answer.get("has_lost"):
                    join.abort(_OthersTrainError())
                    return
            is_decided.wait(_PROBE_SECONDS)

    def _answer(self, request: Request) -> None:
        connection, message = request.connection, request.message
        if isinstance(message.get("asks"), int):
            connection.send({"has_lost": self._has_lost(message["asks"])})
            connection.close()
            return
        number = message.get("number")
        if self._number is None or not isinstance(number, int) or number == self._number:
            connection.close()  # it tries again
        elif number < self._number:
            connection.send({"dials": True})
            connection.close()
            self._start_dialing(number % len(self._addresses))
        else:
            connection.send({"number": self._number, "trains": self._trains(), "offer": dict(self._offer())})
            self._take(number, NonblockingConnection.continuing(connection), {})

    def _start_dialing(self, peer: int) -> None:
        if peer not in self._dialed:
            self._dialed.add(peer)
            self._start(self._dial, peer)

    def _dial(self, peer: int) -> None:
        """Connects with the worker of a rank, once; while this worker does not train, also with one that comes later.

        When it trains, whoever comes later has a larger number.
        """
        is_asked = self._trains()
        while not self._is_over.is_set():
            with contextlib.suppress(TransportError, OSError):
                connection, answer = self._ask(peer, {"number": self._number})
                if isinstance(answer.get("number"), int):
                    self._take(answer["number"], NonblockingConnection.continuing(connection), answer)
                    break
                connection.close()
                if answer.get("dials"):
                    break
            if is_asked or self._trains():
                break
            self._is_over.wait(_PAUSE_SECONDS)
        self._dialed.discard(peer)


def new_number(rank: int, ranks: int) -> int:
    """Returns a number that no process of a rank has had: by the clock, in milliseconds.

    >>> new_number(2, 3) % 3
    2
    """
    return rank + ranks * int(time.time() * 1000)
