"""The nodes that have joined a run, and which of them runs which processes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.run_spec import Role, RunSpec, bracketed
from tfdist.transport.nonblocking_connection import NonblockingConnection
from tfdist.utils.cores_and_ports import is_loopback

SUSPICIOUS_HEARTBEATS = 2.5
"""Number of missed heartbeats after which a node is suspected to be lost."""


class JoinRejectedError(Exception):
    """A node may not join; the text says why."""


@dataclasses.dataclass
class Node:
    """A node that has joined, and its part in the current attempt."""

    rank: int
    host: str  # hostname
    address: str  # where other nodes reach its workers
    workers: int  # number of workers it was started for
    connection: NonblockingConnection
    heard_at: float  # time of its last message
    suspects: bool = False  # it suspects one of its workers to be frozen
    share: int = 0  # number of its workers in the attempt; 0: it does not take part
    roles: Mapping[int, Role] = dataclasses.field(default_factory=dict)  # its processes in the attempt, by rank
    ports: tuple[int, ...] | None = None  # the ports of these processes
    outcome: Outcome | None = None
    training: int = 0  # number of its elastic workers that train
    has_failure: bool = False  # whether it has lost an elastic worker that was not asked to leave

    @property
    def name(self) -> str:
        """The node in messages to users.

        >>> Node(1, "b", "10.0.0.2", 2, None, 0.0).name
        'node 1 (b)'
        """
        return f"node {self.rank} ({self.host})"

    @property
    def has_chief(self) -> bool:
        """Whether a chief runs there, for which other processes run TensorFlow's server."""
        return any(role.task.type == "chief" for role in self.roles.values())

    @property
    def is_running(self) -> bool:
        """Whether it takes part in the attempt and has not reported an outcome."""
        return self.share > 0 and self.outcome is None


class Membership:
    """The nodes of a run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._nodes: dict[int, Node] = {}
        self._sizes: dict[int, int] = {}  # workers of every node that has ever joined

    @property
    def nodes(self) -> list[Node]:
        return [self._nodes[rank] for rank in sorted(self._nodes)]

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._spec.nodes) if rank not in self._nodes]

    @property
    def workers(self) -> int:
        """Number of workers for which the present nodes were started."""
        return sum(node.workers for node in self._nodes.values())

    @property
    def all_workers(self) -> int:
        """Number of workers for which all nodes were started that have ever joined."""
        return sum(self._sizes.values())

    def admit(
        self, connection: NonblockingConnection, message: Mapping[str, Any], *, now: float
    ) -> tuple[Node, Node | None]:
        """Adds a node; returns it, and the silent node of the same rank that it replaces, or None.

        Raises a JoinRejectedError if the node does not fit; ValueError, KeyError or TypeError: malformed message.
        """
        rank, workers = int(message["node"]), int(message["workers"])
        spec, node_options = self._spec, message["options"]
        run_options = spec.common_options
        differing = [option for option, value in run_options.items() if node_options[option] != value]
        if differing:
            received = " ".join(f"{option} {_shown(node_options[option])}" for option in differing)
            expected = " ".join(f"{option} {_shown(run_options[option])}" for option in differing)
            raise JoinRejectedError(
                f"Received: {received}. Expected: {expected}, as on node 0. Use the same options on every host."
            )
        if not 0 <= rank < spec.nodes or workers < 1:
            raise JoinRejectedError(
                f"Received: --node-rank {rank} --workers {workers}. Expected: a rank from 0 to {spec.nodes - 1} and "
                "at least one worker. Give every host a different rank."
            )
        previous_node = self._nodes.get(rank)
        if previous_node is not None and now - previous_node.heard_at < SUSPICIOUS_HEARTBEATS * spec.heartbeat_seconds:
            raise JoinRejectedError(
                f"Received: --node-rank {rank}, which {previous_node.host} has. Expected: a free rank. Give every host "
                "a different rank, or end the other tfdist run first."
            )
        node = Node(rank, str(message["host"])[:255], str(message["address"]), workers, connection, now)
        self._nodes[rank] = node
        self._sizes[rank] = workers
        return node, previous_node

    def remove(self, node: Node) -> bool:
        """Removes a node, unless another one has taken its place; returns whether it did."""
        is_present = self._nodes.get(node.rank) is node
        if is_present:
            del self._nodes[node.rank]
        return is_present

    def addresses(self) -> list[str]:
        """Returns `host:port` of all processes of the attempt, by rank.

        If node 0 knows only its loopback address, because /etc/hosts maps its hostname to it, other nodes reach its
        workers at the address at which they reach the coordinator.
        """
        coordinator_addresses = [node.connection.local_address for node in self.nodes if node.rank]
        reachable_address = next((address for address in coordinator_addresses if not is_loopback(address)), "")
        addresses_by_rank: dict[int, str] = {}
        for node in self.nodes:
            if node.share:
                address = (
                    reachable_address
                    if not node.rank and reachable_address and is_loopback(node.address)
                    else node.address
                )
                addresses_by_rank |= {
                    rank: f"{bracketed(address)}:{port}"
                    for rank, port in zip(node.roles, node.ports or (), strict=True)
                }
        return [addresses_by_rank[rank] for rank in sorted(addresses_by_rank)]


def _shown(value: object) -> str:
    return "(none)" if value is None else str(value)


def workers_left_out(nodes: Sequence[Node], failed_rank: int | None, count: int) -> dict[int, int]:
    """Returns how many workers each node leaves out: first the node of the failed worker, then the last nodes.

    The nodes are the present ones, with the roles that they had in the attempt.
    """
    failed = [node for node in nodes if failed_rank in node.roles]
    left_out: dict[int, int] = {}
    for node in [*failed, *reversed(nodes)]:
        taken = min(count, node.workers - left_out.get(node.rank, 0))
        if taken > 0:
            left_out[node.rank] = left_out.get(node.rank, 0) + taken
            count -= taken
    return left_out
