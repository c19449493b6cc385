"""Configuration of a run that all nodes share; node 0 decides where the nodes differ."""

import dataclasses

from tfdist.launch.restart.timeouts import Timeouts

_HEARTBEAT_SECONDS = 1.0
_HEARTBEATS_PER_TIMEOUT = 4


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """One host of several.

    Args:
        nodes: Number of hosts, at least 2.
        rank: Number of this host, 0 first.
        host: Host of the rendezvous.
        port: Port of the rendezvous.
        address: Address at which other hosts reach this host's workers; None: that of its connection to the rendezvous.
        token: The secret that all hosts share.
    """

    nodes: int
    rank: int
    host: str
    port: int
    address: str | None
    token: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Configuration of a run.

    Args:
        run_id: Identifies the run.
        nodes: Number of nodes.
        max_restarts: Number of restarts allowed.
        min_workers: Least number of workers of all nodes together; None: all.
        restart_delay: Seconds from a failure to the next start, after an attempt without progress.
        start_timeout: Seconds to wait for missing nodes.
        timeouts: When workers are frozen, stalled or killed; `heartbeat_timeout` applies to supervisors, too.
    """

    run_id: str
    nodes: int
    max_restarts: int
    min_workers: int | None
    restart_delay: float
    start_timeout: float
    timeouts: Timeouts

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds of silence after which a node is lost; 0: never."""
        return self.timeouts.heartbeat_timeout

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats of a supervisor or of the coordinator."""
        limit = self.heartbeat_timeout
        return min(_HEARTBEAT_SECONDS, limit / _HEARTBEATS_PER_TIMEOUT) if limit else _HEARTBEAT_SECONDS
