"""The modes of ParameterServerStrategy in which workers push gradients: asynchronously or in synchronous rounds."""

import dataclasses

from tfdist.parameter_server.federated_averaging import FederatedAveraging
from tfdist.utils.argument_checks import is_whole_number


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """Each worker pulls the variables, computes a gradient and pushes it, independently of the others.

    Other workers may update the variables between a worker's pull and its push; the number of these updates is the
    *staleness* of the push. If a worker dies, its batch is given to another worker, so each batch is pushed at least
    once.

    >>> Asynchronous(max_staleness=4)
    Asynchronous(max_staleness=4)

    Attributes:
        max_staleness: The largest staleness of a push, in updates; workers wait to keep it. `None`: no bound.
    """

    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None and not is_whole_number(self.max_staleness, at_least=0):
            raise ValueError(
                f"Invalid `max_staleness`. Received: {self.max_staleness!r}. Expected: a whole number of at "
                "least 0, counting updates, or None for no bound."
            )


@dataclasses.dataclass(frozen=True)
class Synchronous:
    """All workers compute on the same variables, and their gradients make one update. This is a round.

    A batch of `fit` is split by rows over the workers. The update equals that of one process on the complete batch,
    whatever the loss divides by: samples, valid entries of masks, weights, or nothing. If a worker dies, another one
    computes its part; each round updates once.

    >>> Synchronous(backup_workers=1)
    Synchronous(backup_workers=1)

    Attributes:
        backup_workers: How many of the slowest workers a round does not wait for. Their parts of that batch are left
            out; they take part again when they have finished.
    """

    backup_workers: int = 0

    def __post_init__(self) -> None:
        if not is_whole_number(self.backup_workers, at_least=0):
            raise ValueError(
                f"Invalid `backup_workers`. Received: {self.backup_workers!r}. Expected: a whole number of at "
                "least 0 and less than the number of workers."
            )


Mode = Asynchronous | Synchronous | FederatedAveraging


def max_running_pushes(mode: Asynchronous, workers: int) -> int | None:
    """How many pushes may run at the same time; `None`: no bound.

    >>> max_running_pushes(Asynchronous(max_staleness=4), 3), max_running_pushes(Asynchronous(max_staleness=0), 3)
    (3, 1)
    """
    if mode.max_staleness is None:
        return None
    return min(mode.max_staleness // 2 + 1, 2 * workers)


def max_push_window(mode: Asynchronous, workers: int) -> int | None:
    """How many pushes may start before the oldest running one, which counts, has ended; `None`: no bound.

    With `r` running pushes and a window of `w`, a push meets the updates of at most `r - 1` pushes that started before
    it and of `w - 1` that started after it.

    >>> max_push_window(Asynchronous(max_staleness=4), 3), max_push_window(Asynchronous(max_staleness=100), 3)
    (3, 96)
    """
    running = max_running_pushes(mode, workers)
    return None if mode.max_staleness is None or running is None else mode.max_staleness - running + 2
