"""A task of the checked cluster: its connections, and its answers to the others on its port while the checks run."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.cluster import ClusterConfig
from tfdist.cluster.wait_for_peers import reset_on_close
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.checkpoint_checks import sees_marker
from tfdist.doctor.library_checks import own_versions
from tfdist.doctor.link_measurement import MAX_TRANSFER_BYTES, TRANSFER_SECONDS, LinkMeasurement, measure
from tfdist.doctor.peer_connections import TOKEN_VARIABLE, PeerConnections, TaskInfo, doctor_credentials
from tfdist.doctor.report import Finding
from tfdist.transport.blocking_connection import BlockingConnection, close_socket
from tfdist.transport.transport_errors import ConnectionClosedError, TransportError

_HANDSHAKE_SECONDS = 5.0
_IDLE_SECONDS = 600.0
_MAX_STRANGERS = 32  # connections beside those of the peers
_JOIN_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class ReportSummary:
    """The result of the chief, as it sends it to the other tasks."""

    chief: str  # the task that has the report
    errors: int  # number of errors on all tasks
    warnings: int  # number of warnings on all tasks


class MemberTask:
    """This task in its cluster. Without a `server` its port is taken.

    Every task of the cluster may ask for the time, and send and receive bytes; the chief may ask more. Each connection
    is answered in one thread. `close` closes the server's socket.
    """

    def __init__(
        self, context: CheckContext, config: ClusterConfig, server: socket.socket | None, *, clock: Callable[[], float]
    ) -> None:
        self.context, self.clock = context, clock
        self.task = context.task
        self.chief = next(iter(context.addresses))
        self.info = TaskInfo(self.task, socket.gethostname(), own_versions())
        self._credentials = doctor_credentials(config.cluster, context.environ.get(TOKEN_VARIABLE, "").strip())
        peer_addresses = {task: address for task, address in context.addresses.items() if task != self.task}
        self.peers = PeerConnections(
            peer_addresses, self.info, self._credentials, names_are_fixed=config.source == "Slurm"
        )
        self.findings: list[Finding] | None = None
        """Findings on this machine; None: its checks still run."""
        self.summary: ReportSummary | None = None
        self.has_summary = threading.Event()
        self.callers: set[str] = set()
        """The tasks that have connected to this one."""
        self._chief_connections = 0
        self._max_connections = 2 * len(peer_addresses) + _MAX_STRANGERS
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._server = server
        if server is not None:
            threading.Thread(target=self._accept, args=(server,), name="tfdist doctor", daemon=True).start()

    @property
    def is_chief(self) -> bool:
        """Whether this is the first task, which asks all others."""
        return self.task == self.chief

    @property
    def chief_left(self) -> bool:
        """Whether the chief was connected and is not any more."""
        with self._lock:
            return self.chief in self.callers and not self._chief_connections

    @property
    def is_without_chief(self) -> bool:
        """Whether the chief will not ask this task any more: it left, or neither has reached the other."""
        if self._server is None or self.chief_left:
            return True
        connection = self.peers.all[self.chief].connection
        return self.chief not in self.callers if connection is None else not connection.is_open

    def close(self) -> None:
        """Closes all connections and frees the port."""
        self.peers.close()
        if self._server is None:
            return
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._server.close()
        with self._lock:
            threads = dict(self._threads)
        for accepted in threads:
            close_socket(accepted)
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def measure(self, task: str, *, with_bandwidth: bool) -> LinkMeasurement:
        """Measures the connection to a task; raises a ConnectionClosedError if that has not answered, or is gone."""
        peer = self.peers.all.get(task)
        if peer is None or peer.connection is None:
            raise ConnectionClosedError(f"{task} has not answered {self.task}")
        return measure(self.task, task, peer.connection, self.clock, with_bandwidth=with_bandwidth)

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                accepted, _ = server.accept()
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
            peer = self.info.exchange(connection, _HANDSHAKE_SECONDS)
            with self._lock:
                self.callers.add(peer.task)
                self._chief_connections += peer.task == self.chief
            while True:
                self._answer(connection, peer, connection.receive(_IDLE_SECONDS))
        except TransportError:
            pass  # it left, or is a stranger
        finally:
            close_socket(accepted)
            with self._lock:
                self._threads.pop(accepted, None)
                self._chief_connections -= peer is not None and peer.task == self.chief

    def _answer(self, connection: BlockingConnection, peer: TaskInfo, request: dict[str, Any]) -> None:
        request_name = str(request.get("do"))
        if request_name == "echo":
            connection.send({"clock": self.clock()})
        elif request_name in ("send", "receive"):
            count = request.get("bytes")
            if not isinstance(count, int) or not 0 < count <= MAX_TRANSFER_BYTES:
                raise ConnectionClosedError("invalid size of a transfer")
            if request_name == "send":
                connection.send_bytes(count, TRANSFER_SECONDS)
            else:
                connection.send({"bytes_per_second": connection.receive_bytes(count, TRANSFER_SECONDS)})
        elif peer.task == self.chief and (answer := self._answer_to_chief(request_name, request)) is not None:
            connection.send(answer)
        else:
            connection.send({"error": f"{peer.task} may not ask for this: {request_name[:40]}"})

    def _answer_to_chief(self, name: str, request: dict[str, Any]) -> dict[str, Any] | None:
        match name:
            case "state":
                return {"checked": self.findings is not None, "dialed": self.peers.is_done}
            case "stop_waiting":
                self.peers.stop_waiting()
                return {}
            case "report":
                findings = [dataclasses.asdict(finding) for finding in self.findings or ()]
                return {"findings": findings, "missing": self.peers.missing}
            case "measure":
                try:
                    link = self.measure(str(request.get("peer")), with_bandwidth=bool(request.get("bandwidth")))
                except ConnectionClosedError as error:
                    return {"error": str(error)}
                return dataclasses.asdict(link)
            case "see_marker":
                directory = self.context.checkpoints
                return {"seen": None if directory is None else sees_marker(directory, str(request.get("name")))}
            case "summary":
                errors, warnings = (request.get(count) for count in ("errors", "warnings"))
                if isinstance(errors, int) and isinstance(warnings, int):
                    self.summary = ReportSummary(self.chief, errors, warnings)
                    self.has_summary.set()
                return {}
        return None
