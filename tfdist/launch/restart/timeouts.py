"""How long workers may be silent, and how long they have to exit."""

import dataclasses

# Kubernetes and Slurm send SIGKILL 30 s after SIGTERM by default: the launcher has to exit before.
STOP_GRACE_SECONDS = 25.0
FAILURE_GRACE_SECONDS = 5.0
# Before a restart the state of the other workers is useless, and most of them are blocked and do not handle SIGTERM.
RESTART_GRACE_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class GracePeriods:
    """How long workers have to exit, in seconds.

    Args:
        stop: To save and exit after a signal to this command.
        failure: To exit after the failure of another worker.
        patience: To show the root cause after another worker reported a lost peer.
    """

    stop: float
    failure: float
    patience: float


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """The timeouts of a run, in seconds.

    Args:
        grace: From SIGTERM to SIGKILL. None: 25 s after a signal to this command, 5 s after a failure.
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
