"""How the workers of an attempt are ended: SIGTERM, a grace, SIGKILL, until nothing of them is left."""

import math
import signal
import time

from tfdist.launch.crew import Crew

_POLL_SECONDS = 0.05
# What the kernel does not let die even of SIGKILL (a stuck disk) is not waited for for ever.
_UNKILLABLE_SECONDS = 30.0


class Ending:
    """The end of a crew. All times are monotonic, in seconds.

    Args:
        crew: The workers.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.began_at: float | None = None  # set: workers have been told to end
        self.are_all_told = False
        self._kill_at = math.inf
        self._killed_at: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether workers have been told to end."""
        return self.began_at is not None

    @property
    def has_killed(self) -> bool:
        """Whether the grace is over."""
        return self._killed_at is not None

    def tell(self, grace_seconds: float, *, only_script: bool = False) -> None:
        """Tells workers to end, and kills all when the grace is over. What was said before holds if that is sooner.

        Args:
            grace_seconds: Time to SIGKILL.
            only_script: Whether to tell those that run the script alone. A second call tells the others.
        """
        now = time.monotonic()
        self.began_at = now if self.began_at is None else self.began_at
        self._kill_at = min(self._kill_at, now + grace_seconds)
        self.are_all_told = not only_script or self._crew.is_alike
        self._crew.tell(signal.SIGTERM, only_script=only_script)

    def kill(self) -> None:
        """Kills all at once. It may be called between any two instructions."""
        now = time.monotonic()
        self.began_at = now if self.began_at is None else self.began_at
        self.are_all_told = True
        self._killed_at = now
        self._crew.tell(signal.SIGKILL)

    def kill_in_time(self) -> None:
        """Kills all if the grace is over."""
        if self._killed_at is None and time.monotonic() >= self._kill_at:
            self.kill()

    def is_over(self) -> bool:
        """Whether nothing is left, or nothing that can be waited for."""
        if self._killed_at is not None and time.monotonic() > self._killed_at + _UNKILLABLE_SECONDS:
            return True
        return self._crew.are_gone()

    def end_silently(self, grace_seconds: float) -> None:
        """Leaves nothing behind, whatever went wrong before, and closes what belongs to the workers.

        Args:
            grace_seconds: Time for those that have not been told before; 0: none.
        """
        if grace_seconds:
            self.tell(grace_seconds)
        deadline = time.monotonic() + grace_seconds
        while not self._crew.collect() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if not self._crew.collect():
            self.kill()
        while not self.is_over():
            self._crew.collect()
            time.sleep(_POLL_SECONDS)
        self._crew.close()
