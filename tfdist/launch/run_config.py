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
    """How long workers have to exit, in seconds."""

    stop: float  # time to save and exit after a signal to this command
    failure: float  # time to exit after the failure of another worker
    patience: float  # time to show the root cause after another worker reported a lost peer


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The timeouts of a run, in seconds."""

    grace: float | None  # time from SIGTERM to SIGKILL. None: 25 s after a signal to this command, 5 s after a failure.
    heartbeat_timeout: float  # silence after which a worker is frozen; 0: never
    stall_timeout: float  # minimum time without a step of any worker that is a stall; 0: never

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
    """One host of several."""

    nodes: int  # number of hosts, at least 2
    rank: int  # number of this host, 0 first
    host: str  # host of the rendezvous
    port: int  # port of the rendezvous
    # address at which other hosts reach this host's workers; None: that of its connection to the rendezvous
    address: str | None
    token: str = dataclasses.field(repr=False)  # the secret that all hosts share


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Configuration of a run."""

    run_id: str  # identifies the run
    seed: int  # the seed of the run
    nodes: int
    max_restarts: int  # number of restarts allowed
    min_workers: int | None  # least number of workers of all nodes together; None: all
    restart_delay: float  # seconds from a failure to the next start, after an attempt without progress
    start_timeout: float  # seconds to wait for nodes that have not joined yet
    timeouts: Timeouts  # when workers are frozen, stalled or killed; `heartbeat_timeout` applies to supervisors, too
    # whether node 0 also starts a chief, for which all workers run TensorFlow's server and hold stages
    has_chief: bool = False
    # number of parameter servers of all nodes together; with any, node 0 also starts their chief
    parameter_servers: int = 0
    seed_option: int | None = None  # the seed that the user has given to `tfdist run`, or None
    rejoin_timeout: float | None = None  # seconds to wait for lost nodes to join again; None: `start_timeout`

    @property
    def heartbeat_timeout(self) -> float:
        """Seconds of silence after which a node is lost; 0: never."""
        return self.timeouts.heartbeat_timeout

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats of a supervisor or of the coordinator."""
        limit = self.heartbeat_timeout
        return min(_HEARTBEAT_SECONDS, limit / _HEARTBEATS_PER_TIMEOUT) if limit else _HEARTBEAT_SECONDS
