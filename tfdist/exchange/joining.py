"""Connects a worker with all others: authenticated, encrypted if the user gives certificates, by memory on one host.

Each worker listens on its address until all others have joined, and dials those of lower rank. Between two workers
there is one control connection and one link for each channel.
"""

import contextlib
import dataclasses
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.exchange.group_listener import HANDSHAKE_SECONDS, Encryption, GroupListener, Request, ask
from tfdist.exchange.links import SharedMemoryLink, SocketLink, WorkerLink
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Credentials
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.transport.transport_errors import (
    ClusterMismatchError,
    ConnectionClosedError,
    HandshakeError,
    TokenRejectedError,
    TransportError,
)
from tfdist.utils.cores_and_ports import host_and_port

_PAUSE_SECONDS = 0.05
_CHECK_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # after which a worker that is lost while others join is noticed
_DESCRIPTORS = 5
CONTROL = "control"


@dataclasses.dataclass(frozen=True)
class _Joined:
    """A connection to a process that is a worker, for one purpose."""

    rank: int
    purpose: str
    process: str
    connection: BlockingConnection
    descriptors: tuple[int, ...] = ()

    def close(self) -> None:
        self.connection.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclasses.dataclass
class GroupConnections:
    """The connections of a worker."""

    control: dict[int, NonblockingConnection]  # the control connection to each other worker, by rank
    links: dict[str, list[WorkerLink | None]]  # by channel, then by rank; None for this worker


class GroupJoin:
    """Joins a group of workers; the arguments are those of `Exchange`."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        credentials: Credentials,
        channels: Sequence[str],
        *,
        members: Sequence[int] | None = None,
        group: str = "",
        listener: GroupListener | None = None,
        encryption: Encryption | None = None,
        shares_memory: bool = True,
        check_missing: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        self._check_missing = check_missing
        self._rank, self._addresses, self._credentials = rank, list(addresses), credentials
        self._members = range(len(addresses)) if members is None else sorted(members)
        self._channels, self._encryption = list(channels), encryption
        self._joined: queue.SimpleQueue[_Joined | Exception] = queue.SimpleQueue()
        self._arriving = threading.Lock()
        self._has_ended = False
        self._process = secrets.token_hex(16)
        self._group_name, self._keeps_listening = group, listener is not None
        self._listener = listener or GroupListener(
            addresses[rank], credentials, encryption=encryption, shares_memory=shares_memory
        )
        self._reasons: dict[int, str] = {}  # why a worker is missing

    def join(self, timeout_seconds: float) -> GroupConnections:
        """Connects with all workers. Errors are those of `Exchange`."""
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        lower = [member for member in self._members if member < self._rank]
        higher = [member for member in self._members if member > self._rank]
        joined: dict[tuple[int, str], _Joined] = {}
        try:
            if higher:
                self._listener.add(self._group_name, self._take)
                self._listener.open()
            for peer in lower:
                self._start_dialer(peer)
            wanted = {(peer, purpose) for peer in [*lower, *higher] for purpose in (CONTROL, *self._channels)}
            while wanted - joined.keys():
                self._place(self._next(wanted, joined), joined)
                if not wanted - joined.keys():
                    self._forget_lost(joined)
        except BaseException:
            for arrival in joined.values():
                arrival.close()
            raise
        finally:
            with self._arriving:
                self._has_ended = True
            self._listener.remove(self._group_name)
            if not self._keeps_listening:
                self._listener.close()
            with contextlib.suppress(queue.Empty):
                while True:
                    late = self._joined.get_nowait()
                    if isinstance(late, _Joined):
                        late.close()
        return self._group(joined)

    def abort(self, error: Exception) -> None:
        """Makes `join` raise an error, on another thread than that of `join`."""
        self._arrive(error)

    def _place(self, arrival: _Joined, joined: dict[tuple[int, str], _Joined]) -> None:
        """Puts a connection in the place of an earlier one, and of all those of an earlier process."""
        for place, earlier in [*joined.items()]:
            if arrival.rank != earlier.rank:
                continue
            if arrival.process != earlier.process and earlier.purpose == CONTROL and earlier.connection.is_open:
                is_late = not arrival.connection.is_open  # of a process that is gone
                arrival.close()
                if is_late:
                    return
                raise HandshakeError(
                    f"Two processes are worker {arrival.rank}. Received: connections of both as worker {arrival.rank} "
                    f"at {self._addresses[arrival.rank]}, which prove the token. Expected: one process for each "
                    "worker. Look for a process that an earlier run has left, or for the same index in the TF_CONFIG "
                    "of two workers."
                )
            if arrival.process != earlier.process or arrival.purpose == earlier.purpose:
                joined.pop(place).close()
        joined[arrival.rank, arrival.purpose] = arrival

    def _forget_lost(self, joined: dict[tuple[int, str], _Joined]) -> None:
        """Lets workers that were lost while others join connect again: those that are dialed are dialed again."""
        for rank in [rank for rank, purpose in joined if purpose == CONTROL]:
            places = [place for place in joined if place[0] == rank]
            is_dialed = rank < self._rank and len(places) <= len(self._channels)  # still, and notices by itself
            if not is_dialed and not joined[rank, CONTROL].connection.is_open:
                for place in places:
                    joined.pop(place).close()
                self._reasons[rank] = "its process has ended"
                if rank < self._rank:
                    self._start_dialer(rank)

    def _next(self, wanted: set[tuple[int, str]], joined: dict[tuple[int, str], _Joined]) -> _Joined:
        next_check = time.monotonic() + _CHECK_SECONDS
        while (seconds_left := self._deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                arrival = self._joined.get(timeout=min(seconds_left, _LOOK_SECONDS))
                if isinstance(arrival, Exception):
                    raise arrival
                return arrival
            self._forget_lost(joined)
            if self._check_missing is not None and next_check <= time.monotonic() < self._deadline:
                next_check = time.monotonic() + _CHECK_SECONDS
                workers = sorted({rank for rank, _ in wanted - joined.keys()})
                self._check_missing({f"worker {rank}": self._addresses[rank] for rank in workers})
        missing_workers = "; ".join(
            f"worker {rank} at {self._addresses[rank]} ({self._reasons.get(rank, 'it has not connected')})"
            for rank in sorted({rank for rank, _ in wanted - joined.keys()})
        )
        raise TimeoutError(
            f"The workers were not complete after {self._timeout_seconds:g} s. Received: no answer from "
            f"{missing_workers}. Expected: every worker creates its strategy in that time. Check the logs of the "
            "missing workers, or allow more time with `tfdist run --start-timeout` or "
            "`MultiWorkerMirroredStrategy(start_timeout_seconds=...)`."
        )

    def _group(self, joined: dict[tuple[int, str], _Joined]) -> GroupConnections:
        control = {
            rank: NonblockingConnection.continuing(arrival.connection)
            for (rank, purpose), arrival in joined.items()
            if purpose == CONTROL
        }
        links: dict[str, list[WorkerLink | None]] = {name: [None] * len(self._addresses) for name in self._channels}
        for (rank, purpose), arrival in joined.items():
            if purpose == CONTROL:
                continue
            if arrival.descriptors:
                memory, *counters = arrival.descriptors
                link: WorkerLink = SharedMemoryLink(rank, memory, counters, is_creator=rank < self._rank)
                arrival.connection.close()
            else:
                link = SocketLink(rank, arrival.connection.detach()[0])
            links[purpose][rank] = link
        return GroupConnections(control, links)

    def _take(self, request: Request) -> None:
        """Takes a connection of a worker of higher rank."""
        connection, message = request.connection, request.message
        rank, purpose = message.get("rank"), message.get("purpose")
        if not isinstance(rank, int) or rank <= self._rank or rank not in self._members:
            connection.close()
            return
        if purpose not in (CONTROL, *self._channels):
            connection.close()
            return
        identity = self._listener.host_identity
        local = self._listener.local_name if identity and message.get("host") == identity else ""
        connection.send({"rank": self._rank, "process": self._process, "local": local})
        descriptors: tuple[int, ...] = ()
        if request.is_local:
            descriptors = connection.receive_descriptors(_DESCRIPTORS, HANDSHAKE_SECONDS)
        self._arrive(_Joined(rank, str(purpose), str(message.get("process")), connection, descriptors))

    def _arrive(self, arrival: _Joined | Exception) -> None:
        with self._arriving:
            if not self._has_ended:
                self._joined.put(arrival)
                return
        if isinstance(arrival, _Joined):
            arrival.close()

    # The side that dials.

    def _start_dialer(self, peer: int) -> None:
        threading.Thread(target=self._dial, args=(peer,), name="tfdist exchange", daemon=True).start()

    def _dial(self, peer: int) -> None:
        place = host_and_port(self._addresses[peer])
        local = process = ""
        for purpose in (CONTROL, *self._channels):
            while not self._has_ended:
                try:
                    if local and purpose != CONTROL:
                        try:
                            self._arrive(self._open_memory(peer, purpose, local))
                            break
                        except (TransportError, OSError):
                            local = ""  # another network namespace
                    opened, answer = self._open(socket.create_connection(place, 5.0), peer, purpose)
                    if process and answer.get("process") != process:
                        opened.close()  # that worker was started again
                        self._start_dialer(peer)
                        return
                    local, process = str(answer.get("local", "")), str(answer.get("process"))
                    self._arrive(_Joined(peer, purpose, process, opened))
                    break
                except (TokenRejectedError, ClusterMismatchError) as error:
                    self._arrive(refusal(peer, self._addresses[peer], error))
                    return
                except (TransportError, OSError) as error:
                    self._reasons[peer] = str(getattr(error, "strerror", None) or error)
                if time.monotonic() > self._deadline:
                    return
                time.sleep(_PAUSE_SECONDS)

    def _open(self, connection: socket.socket, peer: int, purpose: str) -> tuple[BlockingConnection, dict[str, Any]]:
        own = {"rank": self._rank, "process": self._process, "host": self._listener.host_identity}
        message = {**own, "purpose": purpose, "group": self._group_name}
        opened, answer = ask(connection, self._credentials, message, encryption=self._encryption)
        if answer.get("rank") != peer:
            opened.close()
            raise ConnectionClosedError(f"worker {answer.get('rank')} answers at that address")
        return opened, answer

    def _open_memory(self, peer: int, purpose: str, local: str) -> _Joined:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            connection.connect(f"\0{local}")
            opened, answer = self._open(connection, peer, purpose)
            descriptors = SharedMemoryLink.create()
            arrival = _Joined(peer, purpose, str(answer.get("process")), opened, tuple(descriptors))
        except BaseException:
            connection.close()
            raise
        try:
            opened.send_descriptors(descriptors)
        except BaseException:
            arrival.close()
            raise
        return arrival


def refusal(peer: int, address: str, error: HandshakeError) -> HandshakeError:
    """Returns the error of a worker that another one does not trust."""
    return HandshakeError(
        f"Worker {peer} at {address} refused this worker. Received: {error}. Expected: the same TFDIST_TOKEN, the "
        "same addresses and the same attempt on all workers. Start all workers by one launcher, or set the same "
        "TFDIST_TOKEN for all."
    )
