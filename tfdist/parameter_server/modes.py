"""How updates of workers come together."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """Each worker pulls the variables, computes a gradient, and pushes it, whatever the others do.

    The variables may have moved on meanwhile: by as many updates as the push is *stale*. A batch that a dying worker
    was at is given to another one, so each batch is pushed at least once.

    >>> Asynchronous(max_staleness=4).most_at_work(3)
    3
    >>> Asynchronous(max_staleness=0).most_at_work(3)
    1

    Attributes:
      max_staleness: no push is staler; workers wait where it would be. `None`: no bound.
    """

    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None and not _is_count(self.max_staleness):
            raise ValueError(
                f"`max_staleness` is no number of updates. Received: {self.max_staleness!r}. Expected: a whole number "
                "of at least 0, or None for no bound."
            )

    def most_at_work(self, workers: int) -> int | None:
        """How many batches may be at work at once; `None`: no bound."""
        if self.max_staleness is None:
            return None
        return min(self.max_staleness // 2 + 1, 2 * workers)

    def longest_span(self, workers: int) -> int | None:
        """How many batches may be begun until the oldest at work, which is one of them, has ended; `None`: no bound.

        With `w` at work at once and spans of `s`, a push meets updates of at most `w - 1` that were begun before it and
        `s - 1` begun after it.

        >>> Asynchronous(max_staleness=4).longest_span(3)
        3
        >>> Asynchronous(max_staleness=100).longest_span(3)
        96
        """
        at_work = self.most_at_work(workers)
        return None if self.max_staleness is None or at_work is None else self.max_staleness - at_work + 2


@dataclasses.dataclass(frozen=True)
class Synchronous:
    """All workers compute on the same variables, and one update is made of their gradients, in rounds.

    A batch of `fit` is shared out by rows over the workers; the update is that of one process on the whole batch,
    whatever the loss divides by: samples, the valid entries of masks, weights, or nothing. The part of a worker that
    dies is computed by another one; each round updates once.

    >>> Synchronous(backup_workers=1)
    Synchronous(backup_workers=1)

    Attributes:
      backup_workers: a round does not wait for so many of its slowest workers. Their parts of that batch are left out,
        and they take part again when they have finished.
    """

    backup_workers: int = 0

    def __post_init__(self) -> None:
        if not _is_count(self.backup_workers):
            raise ValueError(
                f"`backup_workers` is no number of workers. Received: {self.backup_workers!r}. Expected: a whole "
                "number of at least 0, less than the workers."
            )


Mode = Asynchronous | Synchronous


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
