"""What holds for all hosts of a run; node 0's word, where hosts may not differ."""

import dataclasses

from tfdist.launch.limits import Limits

_BEAT_SECONDS = 1.0
_BEATS_IN_LIMIT = 4


@dataclasses.dataclass(frozen=True)
class Rules:
    """How hosts go together.

    Args:
        run_id: What tells this run from others.
        nodes: Number of hosts.
        max_restarts: How many restarts are allowed in all.
        min_workers: The least number of workers, of all hosts together; None: all.
        restart_delay: Seconds from a failure to the next start after an attempt without progress.
        start_timeout: Seconds to wait for hosts that are missing.
        limits: When workers are judged or ended; `heartbeat_timeout` holds for supervisors as well.
    """

    run_id: str
    nodes: int
    max_restarts: int
    min_workers: int | None
    restart_delay: float
    start_timeout: float
    limits: Limits

    @property
    def silence_limit(self) -> float:
        """Seconds of silence after which a supervisor is lost; 0: never."""
        return self.limits.heartbeat_timeout

    @property
    def beat_seconds(self) -> float:
        """Seconds between two signs of life."""
        limit = self.silence_limit
        return min(_BEAT_SECONDS, limit / _BEATS_IN_LIMIT) if limit else _BEAT_SECONDS
