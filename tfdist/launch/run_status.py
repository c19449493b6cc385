"""What is known of a run while it goes on: in one line for a terminal, and as news for a log."""

from collections.abc import Sequence

from tfdist.launch.fits import of_fit
from tfdist.launch.liveness import Liveness
from tfdist.launch.roles import Role, describe_jobs

_NEWS_SECONDS = 10.0  # between two checkpoints that a log is told of


class RunStatus:
    """What the workers' heartbeats and the attempts tell. All times are monotonic, in seconds.

    Steps and checkpoints are told by `FailureRecovery`; without it only the workers are known.

    Args:
        workers: How many were asked for.

    >>> from tfdist.launch.roles import peers
    >>> liveness = Liveness(2, now=0.0, heartbeat_timeout_seconds=10.0, stall_timeout_seconds=0.0)
    >>> status = RunStatus(2)
    >>> status.begin(1, peers(2), liveness, now=0.0)
    >>> liveness.hear(0, b'{"step": 1230, "saved": 5, "saved_step": 1200}', now=1.0)
    >>> status.news(now=1.0)
    ['training goes on after step 1,230 with 2 workers (restart 1)', 'checkpoint saved at step 1,200']
    >>> status.line(now=13.0)
    'tfdist: 2 workers · step 1,230 · 1 restart · checkpoint 1,200, 12 s ago'
    """

    def __init__(self, workers: int) -> None:
        self._all_workers = workers
        self._attempt = 0
        self._jobs = ""
        self._liveness: Liveness | None = None
        self._began_at = 0.0
        self._has_told_start = False
        self._told_jobs = ""
        # The `fit` and the sequence number of the newest checkpoint of all attempts.
        self._saved: tuple[int, int] | None = None
        self._saves: dict[int, int] = {}  # the highest of each `fit`, which an attempt may leave out
        self._saved_step: int | None = None
        self._saved_at = 0.0
        self._told_saved: tuple[int, int] | None = None
        self._told_saved_at = -_NEWS_SECONDS

    def begin(self, attempt: int, roles: Sequence[Role], liveness: Liveness, *, now: float) -> None:
        """Takes note that an attempt begins.

        Args:
            attempt: Its number, 0 first.
            roles: What the processes of this host are.
            liveness: What is heard of them.
            now: The time.
        """
        workers = sum(role.task.type == "worker" for role in roles)
        self._jobs = describe_jobs(roles)
        if workers < self._all_workers and len(roles) == workers:
            self._jobs = f"{workers} of {self._all_workers} workers"
        self._attempt, self._liveness, self._began_at = attempt, liveness, now
        self._has_told_start = False

    def line(self, *, now: float) -> str:
        """Returns what is known, the most important first."""
        self._look(now)
        fit, step = (1, None) if self._liveness is None else (self._liveness.fit, self._liveness.step)
        phase = None if self._liveness is None else self._liveness.phase
        how_far = f"running for {_span(now - self._began_at)}" if step is None else f"step {step:,}{of_fit(fit)}"
        parts = [self._jobs, how_far]
        if phase is not None:
            parts.append(phase)
        if self._attempt:
            parts.append("1 restart" if self._attempt == 1 else f"{self._attempt} restarts")
        if self._saved is not None and self._saved_step is not None and self._saved[0] >= fit:
            parts.append(f"checkpoint {self._saved_step:,}{of_fit(self._saved[0])}, {_span(now - self._saved_at)} ago")
        return "tfdist: " + " · ".join(parts)

    def news(self, *, now: float, is_over: bool = False) -> list[str]:
        """Returns what has changed since it was last asked for; of checkpoints that follow each other fast only some.

        Args:
            now: The time.
            is_over: Whether the attempt is over, so that nothing may wait any more.
        """
        self._look(now)
        news = []
        step = None if self._liveness is None else self._liveness.step
        if self._liveness is not None and step is not None and not self._has_told_start:
            self._has_told_start = True
            news.append(self._start(step, self._liveness.fit))
            self._told_jobs = self._jobs
        is_time = is_over or now - self._told_saved_at >= _NEWS_SECONDS
        if is_time and self._saved not in (None, self._told_saved) and self._saved_step is not None:
            self._told_saved, self._told_saved_at = self._saved, now
            news.append(f"checkpoint saved at step {self._saved_step:,}{of_fit(self._saved[0])}")
        return news

    def _start(self, step: int, fit: int) -> str:
        how = f"training goes on after step {step:,}{of_fit(fit)}" if step else "training begins"
        notes = [f"restart {self._attempt}"] if self._attempt else []
        if self._told_jobs not in ("", self._jobs):
            notes.append(f"before with {self._told_jobs}")
        return f"{how} with {self._jobs}" + (f" ({', '.join(notes)})" if notes else "")

    def _look(self, now: float) -> None:
        if self._liveness is None or self._liveness.saved is None:
            return
        fit, saved = self._liveness.fit, self._liveness.saved
        if saved > self._saves.get(fit, -1):
            self._saves[fit] = saved
            self._saved, self._saved_step, self._saved_at = (fit, saved), self._liveness.saved_step, now


def _span(seconds: float) -> str:
    """Returns a time in its largest units.

    >>> _span(12.7), _span(125), _span(7300)
    ('12 s', '2 min', '2 h 1 min')
    """
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
