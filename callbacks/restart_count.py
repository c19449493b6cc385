"""How often a training was started again."""

import functools
import os
import secrets
from typing import Any


class RestartCount:
    """Counts the starts of a training after the first.

    One by `tfdist run` counts whatever came of it; one by hand counts where the training then goes on from a
    checkpoint, as nothing else tells that it is the same training.

    >>> count = RestartCount()
    >>> count.resume({"restarts": 2, "run": "one that is over", "attempt": 1})
    >>> count.number - attempt_of_run()
    3
    """

    def __init__(self) -> None:
        self._before = 0  # this run of `tfdist run`, or this process

    @property
    def number(self) -> int:
        """The restarts so far."""
        return self._before + attempt_of_run()

    def state(self) -> dict[str, Any]:
        """What `resume` takes, as JSON."""
        return {"restarts": self.number, "run": run_id(), "attempt": attempt_of_run()}

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on from the `state` that a checkpoint holds."""
        is_same_run = state["run"] == run_id()
        self._before = state["restarts"] - state["attempt"] if is_same_run else state["restarts"] + 1


def attempt_of_run() -> int:
    """Which attempt of `tfdist run` this process belongs to, 0 first; 0 under other launchers."""
    return int(os.environ.get("TFDIST_ATTEMPT", "0"))


@functools.cache
def run_id() -> str:
    """The same for all attempts of one `tfdist run`; under other launchers of this process alone."""
    return os.environ.get("TFDIST_RUN_ID") or secrets.token_hex(8)
