"""Configuration of a run: its timeouts, its hosts, and what all hosts share; node 0 decides where they differ."""

import dataclasses

TOKEN_VARIABLE = "TFDIST_TOKEN"
# Kubernetes and Slurm send SIGKILL 30 s after SIGTERM by default: the launcher has to exit before.
STOP_GRACE_SECONDS = 25.0
FAILURE_GRACE_SECONDS = 5.0
# Before a restart the state of the other workers is useless, and most of them are blocked and do not handle SIGTERM.
RESTART_GRACE_SECONDS = 0.5
_HEARTBEAT_SECONDS = 1.0
_HEARTBEATS_PER_TIMEOUT = 4


@dataclasses.dataclass(frozen=True)
class GracePeriods:
    """How long workers have to exit, in seconds.

    Args:
        stop: Time to save and exit after a signal to this command.
        failure: Time to exit after the failure of another worker.
        patience: Time to show the root cause after another worker reported a lost peer.
    """

    stop: float
    failure: float
    patience: float


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The timeouts of a run, in seconds.

    Args:
        grace: Time from SIGTERM to SIGKILL. None: 25 s after a signal to this command, 5 s after a failure.
        heartbeat_timeout: Silence after which a worker is frozen; 0: never.
        stall_timeout: Minimum time without a step of any worker that is a stall; 0: never.
    """

    grace: float | None
    heartbeat_timeout: float
    stall_timeout: float

    def grace_periods(self, *, may_restart: bool) -> GracePeriods:
        """Returns how long workers have to exit.

        Args:
            may_restart: Whether a failure may be followed by a restart.

        >>> Timeouts(60.0, 10.0, 0.0).grace_periods(may_restart=True)
        GracePeriods(stop=60.0, failure=0.5, patience=60.0)
        """
        failure = FAILURE_GRACE_SECONDS if self.grace is None else self.grace
        return GracePeriods(
            stop=STOP_GRACE_SECONDS if self.grace is None else self.grace,
            failure=min(failure, RESTART_GRACE_SECONDS) if may_restart else failure,
            patience=failure,
        )


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
        seed: The seed of the run.
        nodes: Number of nodes.
        max_restarts: Number of restarts allowed.
        min_workers: Least number of workers of all nodes together; None: all.
        restart_delay: Seconds from a failure to the next start, after an attempt without progress.
        start_timeout: Seconds to wait for nodes that have not joined yet.
        timeouts: When workers are frozen, stalled or killed; `heartbeat_timeout` applies to supervisors, too.
        has_chief: Whether node 0 also starts a chief, for which all workers run TensorFlow's server and hold stages.
        parameter_servers: Number of parameter servers of all nodes together; with any, node 0 also starts their chief.
        seed_option: The seed that the user has given to `tfdist run`, or None.
        rejoin_timeout: Seconds to wait for lost nodes to join again; None: `start_timeout`.
    """

    run_id: str
    seed: int
    nodes: int
    max_restarts: int
    min_workers: int | None
    restart_delay: float
    start_timeout: float
    timeouts: Timeouts
    has_chief: bool = False
    parameter_servers: int = 0
    seed_option: int | None = None
    rejoin_timeout: float | None = None

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds of silence after which a node is lost; 0: never."""
        return self.timeouts.heartbeat_timeout

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats of a supervisor or of the coordinator."""
        limit = self.heartbeat_timeout
        return min(_HEARTBEAT_SECONDS, limit / _HEARTBEATS_PER_TIMEOUT) if limit else _HEARTBEAT_SECONDS
