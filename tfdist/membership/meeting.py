"""How a worker finds the others: it begins with all of them, or they train already, and it joins them."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.group_listener import Encryption, GroupListener, Request, ask
from tfdist.exchange.joining import GroupJoin, refusal
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import (
    ClusterMismatchError,
    ConnectionClosedError,
    TokenRejectedError,
    TransportError,
)
from tfdist.utils.cores_and_ports import host_and_port

_GROUP = "membership"
_FIRST_GROUP = "membership of the first view"
_PROBE_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
_LOOK_SECONDS = 0.01
_CONNECT_SECONDS = 5.0


class _OthersTrainError(Exception):
    pass


class Meeting:
    """Connects a worker with others for the membership, for as long as it lives.

    Between two workers the younger one, which has the larger number, opens the connection.

    Args:
        rank: The rank of this worker.
        addresses: `host:port` of each worker, by rank.
        beginning: How many workers begin together, those of the lowest ranks.
        listener: What listens on the address of this worker.
        credentials: What both sides of a connection prove.
        encryption: Encrypts connections between hosts, if given.
        trains: Whether this worker is one of those that train.
        newest_if_lost: Returns the largest number that it knows, if it trains without any worker of a rank.
        is_connected: Whether it is connected with a worker of a rank.
        offer: What a worker that joins gets to know from one that trains.
        take: Called with the number of another worker, the connection to it, what that worker says of itself, and
            `is_dialed`, whether this one has opened the connection; on any thread.

    Attributes:
        newest: The largest number of which this worker has heard.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        beginning: int,
        listener: GroupListener,
        credentials: Credentials,
        *,
        encryption: Encryption | None,
        trains: Callable[[], bool],
        newest_if_lost: Callable[[int], int | None],
        is_connected: Callable[[int], bool],
        offer: Callable[[], Mapping[str, Any]],
        take: Callable[..., None],
    ) -> None:
        self._rank, self._addresses, self._beginning = rank, list(addresses), beginning
        self._listener, self._credentials, self._encryption = listener, credentials, encryption
        self._trains, self._offer, self._take = trains, offer, take
        self._newest_if_lost, self._is_connected, self.newest = newest_if_lost, is_connected, 0
        self._number: int | None = None  # None: it is not decided whether this worker begins or joins
        self._dialed: set[int] = set()
        self._is_over = threading.Event()
        listener.add(_GROUP, self._answer)

    def begin(self, timeout_seconds: float) -> dict[int, NonblockingConnection] | None:
        """Begins with all that begin; returns the connections to them, by rank, or `None` if others train already.

        A worker of a higher rank waits until others train.

        Raises:
            TimeoutError, OSError, HandshakeError: See `Exchange`.
        """
        self._listener.open()
        deadline = time.monotonic() + timeout_seconds
        while True:
            connections = self._connect_first(max(deadline - time.monotonic(), 0.0))
            if connections is None or _all_are_connected(connections, deadline):
                return connections
            # A worker has ended meanwhile. Those that have begun with all others see that this one has, too.
            for connection in connections.values():
                connection.close()

    def _connect_first(self, timeout_seconds: float) -> dict[int, NonblockingConnection] | None:
        join = self._first_join()
        is_decided = threading.Event()
        for peer in self._other_ranks():
            self._start(self._probe, peer, join, is_decided)
        try:
            return dict(join.join(timeout_seconds).control)
        except _OthersTrainError:
            return None
        finally:
            is_decided.set()

    def _first_join(self) -> "GroupJoin | _Wait":
        if self._rank >= self._beginning:
            return _Wait(self._rank, self._beginning)
        return GroupJoin(
            self._rank,
            self._addresses,
            self._credentials,
            (),
            members=range(self._beginning),
            group=_FIRST_GROUP,
            listener=self._listener,
            encryption=self._encryption,
        )

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

    def _probe(self, peer: int, join: "GroupJoin | _Wait", is_decided: threading.Event) -> None:
        while not is_decided.is_set():
            try:
                connection, answer = self._ask(peer, {"asks": self._rank})
                connection.close()
                if isinstance(newest := answer.get("newest"), int):
                    self.newest = max(self.newest, newest)
                    join.abort(_OthersTrainError())
                    return
            except (TokenRejectedError, ClusterMismatchError) as error:
                join.abort(refusal(peer, self._addresses[peer], error))
                return
            except (TransportError, OSError):
                pass  # it has not started, or has ended
            is_decided.wait(_PROBE_SECONDS)

    def _answer(self, request: Request) -> None:
        connection, message = request.connection, request.message
        if isinstance(message.get("asks"), int):
            connection.send({"newest": self._newest_if_lost(message["asks"])})
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
            connection.send(self._description())
            self._take(number, NonblockingConnection.continuing(connection), message, is_dialed=False)

    def _description(self) -> dict[str, Any]:
        trains = self._trains()
        return {"number": self._number, "trains": trains, "offer": dict(self._offer()) if trains else {}}

    def _start_dialing(self, peer: int) -> None:
        if peer not in self._dialed:
            self._dialed.add(peer)
            self._start(self._dial, peer)

    def _dial(self, peer: int) -> None:
        """Connects with the worker of a rank, once; while this worker does not train, also with one that comes later.

        When it trains, whoever comes later has a larger number, or asks this one to dial.
        """
        is_asked = self._trains()
        while not self._is_over.is_set():
            with contextlib.suppress(TransportError, OSError):
                connection, answer = self._ask(peer, self._description())
                if isinstance(answer.get("number"), int):
                    opened = NonblockingConnection.continuing(connection)
                    self._take(answer["number"], opened, answer, is_dialed=True)
                    break
                connection.close()  # and if it is younger it dials; if that fails, it is asked again
            if is_asked or self._trains() or self._is_connected(peer):
                break
            self._is_over.wait(_PAUSE_SECONDS)
        self._dialed.discard(peer)


class _Wait:
    """In place of a `GroupJoin`, for a worker that does not begin."""

    def __init__(self, rank: int, beginning: int) -> None:
        self._rank, self._beginning = rank, beginning
        self._aborted: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def join(self, timeout_seconds: float) -> Any:
        """Waits until `abort` is called, and raises its error, or a TimeoutError."""
        try:
            raise self._aborted.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"Worker {self._rank} joins a training of others, and none has begun in {timeout_seconds:.3g} s. "
                f"Received: no answer of a worker that trains. Expected: workers 0 to {self._beginning - 1} begin "
                "together. Look at their output."
            ) from None

    def abort(self, error: Exception) -> None:
        self._aborted.put(error)


def _all_are_connected(connections: Mapping[int, NonblockingConnection], deadline: float) -> bool:
    """Waits until all workers are connected with all others; returns false if one is lost before.

    Otherwise a worker that is lost now would be lost for some, and never there for others.
    """
    for connection in connections.values():
        with contextlib.suppress(ConnectionClosedError):
            connection.send({"begins": True})
    waiting = dict(connections)
    while waiting:
        for rank, connection in [*waiting.items()]:
            try:
                connection.flush()
                if next(connection.receive(), None) is not None:  # later messages are left to the membership
                    del waiting[rank]
            except ConnectionClosedError:
                return False
        if waiting and time.monotonic() > deadline:
            raise TimeoutError(
                f"Worker {min(waiting)} has not connected with all others in time. Expected: each worker reaches each "
                "other one. `tfdist doctor` on all hosts says which cannot."
            )
        if waiting:
            time.sleep(_LOOK_SECONDS)
    return True


def new_number(rank: int, ranks: int, newest: int = 0) -> int:
    """Returns a number that no process of a rank has had: by the clock, in milliseconds.

    It is larger than `newest`, whatever the clock says.

    >>> new_number(2, 3) % 3
    2
    >>> new_number(2, 3, newest=10**15) > 10**15
    True
    """
    return rank + ranks * max(int(time.time() * 1000), newest // ranks + 1)
