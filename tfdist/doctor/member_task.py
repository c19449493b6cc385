"""A task of the checked cluster: its connections, and its answers to the chief."""

import dataclasses
import socket
import threading
from collections.abc import Callable
from typing import Any

from tfdist.cluster import ClusterConfig
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.checkpoint_checks import sees_marker
from tfdist.doctor.library_checks import own_versions
from tfdist.doctor.link_measurement import LinkMeasurement, measure
from tfdist.doctor.peer_connections import TOKEN_VARIABLE, PeerConnections, TaskInfo, doctor_credentials
from tfdist.doctor.peer_server import Handler, PeerServer
from tfdist.doctor.report import Finding
from tfdist.transport.transport_errors import ConnectionClosedError


@dataclasses.dataclass(frozen=True)
class ReportSummary:
    """The result of the chief, as it sends it to the other tasks."""

    chief: str  # the task that has the report
    errors: int  # number of errors on all tasks
    warnings: int  # number of warnings on all tasks


class MemberTask:
    """This task in its cluster. Without a `server` its port is taken."""

    def __init__(
        self,
        context: CheckContext,
        config: ClusterConfig,
        server: socket.socket | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.context, self.clock = context, clock
        self.task = context.task
        self.chief = next(iter(context.addresses))
        self.info = TaskInfo(self.task, socket.gethostname(), own_versions())
        credentials = doctor_credentials(config.cluster, context.environ.get(TOKEN_VARIABLE, "").strip())
        peer_addresses = {task: address for task, address in context.addresses.items() if task != self.task}
        self.peers = PeerConnections(peer_addresses, self.info, credentials, names_are_fixed=config.source == "Slurm")
        self.findings: list[Finding] | None = None
        """Findings on this machine; None: its checks still run."""
        self.summary: ReportSummary | None = None
        self.has_summary = threading.Event()
        self._server: PeerServer | None = None
        if server is not None:
            handlers: dict[str, Handler] = {
                "state": lambda _: {"checked": self.findings is not None, "dialed": self.peers.is_done},
                "stop_waiting": self._stop_waiting,
                "report": lambda _: {
                    "findings": [finding.to_json() for finding in self.findings or ()],
                    "missing": self.peers.missing,
                },
                "measure": self._measure,
                "see_marker": self._see_marker,
                "summary": self._take_summary,
            }
            self._server = PeerServer(
                server,
                self.info,
                credentials,
                chief=self.chief,
                clock=clock,
                handlers=handlers,
                max_peers=len(peer_addresses),
            )

    @property
    def is_chief(self) -> bool:
        """Whether this is the first task, which asks all others."""
        return self.task == self.chief

    @property
    def callers(self) -> frozenset[str]:
        """The tasks that have connected to this one."""
        return frozenset() if self._server is None else frozenset(self._server.callers)

    @property
    def chief_left(self) -> bool:
        """Whether the chief was connected and is not any more."""
        return self._server is not None and self._server.chief_left

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
        if self._server is not None:
            self._server.close()

    def measure(self, task: str, *, with_bandwidth: bool) -> LinkMeasurement:
        """Measures the connection to another task.

        Raises:
            ConnectionClosedError: If that task has not answered, or is gone.
        """
        peer = self.peers.all.get(task)
        if peer is None or peer.connection is None:
            raise ConnectionClosedError(f"{task} has not answered {self.task}")
        return measure(self.task, task, peer.connection, self.clock, with_bandwidth=with_bandwidth)

    def _stop_waiting(self, request: dict[str, Any]) -> dict[str, Any]:
        del request
        self.peers.stop_waiting()
        return {}

    def _measure(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.measure(str(request.get("peer")), with_bandwidth=bool(request.get("bandwidth"))).to_json()
        except ConnectionClosedError as error:
            return {"error": str(error)}

    def _see_marker(self, request: dict[str, Any]) -> dict[str, Any]:
        directory = self.context.checkpoints
        return {"seen": None if directory is None else sees_marker(directory, str(request.get("name")))}

    def _take_summary(self, request: dict[str, Any]) -> dict[str, Any]:
        errors, warnings = (request.get(name) for name in ("errors", "warnings"))
        if isinstance(errors, int) and isinstance(warnings, int):
            self.summary = ReportSummary(self.chief, errors, warnings)
            self.has_summary.set()
        return {}
