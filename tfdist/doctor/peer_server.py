"""Answers the other tasks on this task's port while the checks run."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.cluster.wait_for_peers import reset_on_close
from tfdist.doctor.peer_connections import TaskInfo
from tfdist.transport.blocking_connection import BlockingConnection, close_socket
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import ConnectionClosedError, TransportError

MAX_TRANSFER_BYTES = 2**28
TRANSFER_SECONDS = 15.0
_HANDSHAKE_SECONDS = 5.0
_IDLE_SECONDS = 600.0
_MAX_STRANGERS = 32  # connections beside those of the peers
_JOIN_SECONDS = 2.0

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class PeerServer:
    """Answers the peers, each connection in one thread.

    Every task of the cluster may ask for the time, and send and receive bytes. The
    `handlers` answer further requests, of the chief only. `close` closes the server's socket.
    """

    def __init__(
        self,
        server: socket.socket,
        info: TaskInfo,
        credentials: Credentials,
        *,
        chief: str,
        clock: Callable[[], float],
        handlers: Mapping[str, Handler],
        max_peers: int,
    ) -> None:
        self._server, self._info, self._credentials = server, info, credentials
        self._chief, self._clock, self._handlers = chief, clock, handlers
        self._max_connections = 2 * max_peers + _MAX_STRANGERS
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self.callers: set[str] = set()
        """The tasks that have connected to this one."""
        self._chief_connections = 0
        threading.Thread(target=self._accept, name="tfdist doctor", daemon=True).start()

    @property
    def chief_left(self) -> bool:
        """Whether the chief was connected and is not any more."""
        with self._lock:
            return self._chief in self.callers and not self._chief_connections

    def close(self) -> None:
        """Closes all connections and frees the port."""
        try:
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        except OSError:
            pass
        self._server.close()
        with self._lock:
            threads = dict(self._threads)
        for accepted in threads:
            close_socket(accepted)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._server.accept()
            except OSError:
                return  # closed
            with self._lock:
                is_full = len(self._threads) >= self._max_connections
            if is_full:
                accepted.close()
                continue
            try:
                reset_on_close(accepted)  # the port is needed by the training that follows
            except OSError:  # gone already
                accepted.close()
                continue
            thread = threading.Thread(target=self._serve, args=(accepted,), name="tfdist doctor peer", daemon=True)
            with self._lock:
                self._threads[accepted] = thread
                thread.start()

    def _serve(self, accepted: socket.socket) -> None:
        peer = None
        try:
            connection = BlockingConnection.accept(accepted, self._credentials, timeout_seconds=_HANDSHAKE_SECONDS)
            peer = self._info.exchange(connection, _HANDSHAKE_SECONDS)
            with self._lock:
                self.callers.add(peer.task)
                self._chief_connections += peer.task == self._chief
            while True:
                self._answer(connection, peer, connection.receive(_IDLE_SECONDS))
        except TransportError:
            pass  # it left, or is a stranger
        finally:
            close_socket(accepted)
            with self._lock:
                self._threads.pop(accepted, None)
                self._chief_connections -= peer is not None and peer.task == self._chief

    def _answer(self, connection: BlockingConnection, peer: TaskInfo, request: dict[str, Any]) -> None:
        request_name = str(request.get("do"))
        if request_name == "echo":
            connection.send({"clock": self._clock()})
        elif request_name in ("send", "receive"):
            count = request.get("bytes")
            if not isinstance(count, int) or not 0 < count <= MAX_TRANSFER_BYTES:
                raise ConnectionClosedError("invalid size of a transfer")
            if request_name == "send":
                connection.send_bytes(count, TRANSFER_SECONDS)
            else:
                connection.send({"bytes_per_second": connection.receive_bytes(count, TRANSFER_SECONDS)})
        elif request_name in self._handlers and peer.task == self._chief:
            connection.send(self._handlers[request_name](request))
        else:
            connection.send({"error": f"{peer.task} may not ask for this: {request_name[:40]}"})
