"""How long workers may be silent, and how long they are given to end."""

import dataclasses

# Kubernetes and Slurm send SIGKILL 30 s after SIGTERM by default: the launcher is to be through before.
STOP_GRACE_SECONDS = 25.0
FAILURE_GRACE_SECONDS = 5.0
# The others are to be started anew, and what they hold is of no use: most are stuck and hear no SIGTERM.
RESTART_GRACE_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Graces:
    """How long workers are given, in seconds.

    Args:
        stop: To save and end after a signal to this command.
        failure: To end after another's failure.
        patience: For a worker to show the cause when another only tells of a lost peer.
    """

    stop: float
    failure: float
    patience: float


@dataclasses.dataclass(frozen=True)
class Limits:
    """Times in seconds after which workers are judged or ended.

    Args:
        grace: Between SIGTERM and SIGKILL; None: 25 s after a signal to this command, 5 s after a failure.
        heartbeat_timeout: Silence after which a worker is frozen; 0: never.
        stall_timeout: The least time without a step of any worker that is a stall; 0: never.
    """

    grace: float | None
    heartbeat_timeout: float
    stall_timeout: float

    def graces(self, *, may_restart: bool) -> Graces:
        """Returns how long workers are given.

        Args:
            may_restart: Whether a failure may be followed by a restart.

        >>> Limits(60.0, 10.0, 0.0).graces(may_restart=True)
        Graces(stop=60.0, failure=0.5, patience=60.0)
        """
        failure = FAILURE_GRACE_SECONDS if self.grace is None else self.grace
        return Graces(
            stop=STOP_GRACE_SECONDS if self.grace is None else self.grace,
            failure=min(failure, RESTART_GRACE_SECONDS) if may_restart else failure,
            patience=failure,
        )
