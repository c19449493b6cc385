"""LoadBalancing: how the rows of a global batch follow the measured speeds of the workers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.utils.argument_checks import is_number, is_whole_number


@dataclasses.dataclass(frozen=True)
class LoadBalancing:
    """Divides the rows of every global batch by the measured speeds of the workers.

    >>> LoadBalancing(every_steps=50, max_share=0.75).limits(2)
    (0.75, 0.75)

    Attributes:
        every_steps: The number of training steps (micro-steps, with accumulation) after which the rows are divided
            again. They stay as they are if that would save less than 3 % of a step.
        smoothing: The weight of earlier measurements in a worker's seconds per row, from 0 to less than 1.
        max_share: The largest part of a batch that a worker gets, as a fraction, because of its memory. A sequence has
            one number for each worker, by rank.
    """

    every_steps: int = 20
    smoothing: float = 0.5
    max_share: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        if not is_whole_number(self.every_steps, at_least=1):
            raise ValueError(
                f"Invalid `every_steps` of a LoadBalancing. Received: {self.every_steps!r}. Expected: a whole number "
                "of at least 1, the number of training steps between two divisions, such as 20."
            )
        if not is_number(self.smoothing, at_least=0) or self.smoothing >= 1:
            raise ValueError(
                f"Invalid `smoothing` of a LoadBalancing. Received: {self.smoothing!r}. Expected: a number from 0 (the "
                "last measurement alone counts) to less than 1, such as 0.5."
            )
        limits = self.max_share if isinstance(self.max_share, Sequence) else [self.max_share]
        if not limits or not all(is_number(limit, at_least=0) and 0 < limit <= 1 for limit in limits):
            raise ValueError(
                f"Invalid `max_share` of a LoadBalancing. Received: {self.max_share!r}. Expected: a fraction above 0 "
                "and at most 1, such as 0.75, or one for each worker, as (0.75, 0.5)."
            )

    def limits(self, workers: int) -> tuple[float, ...]:
        """Returns the largest share of each of `workers` workers.

        Raises:
            ValueError: The number of workers is another one, or the shares cannot add up to a batch.
        """
        limits = tuple(self.max_share) if isinstance(self.max_share, Sequence) else (self.max_share,) * workers
        if len(limits) != workers or sum(limits) < 1:
            raise ValueError(
                f"The largest shares do not fit the workers. Received: max_share={self.max_share!r} with {workers} "
                "workers. Expected: one number, or one for each worker, whose sum over all workers is at least 1. "
                "Raise `max_share`."
            )
        return tuple(float(limit) for limit in limits)


def load_balancing_of(value: Any) -> LoadBalancing | None:
    """Returns the options that a strategy's `load_balancing` stands for, or `None` if shares do not follow speeds.

    >>> load_balancing_of(True), load_balancing_of(False)
    (LoadBalancing(every_steps=20, smoothing=0.5, max_share=1.0), None)
    """
    if isinstance(value, LoadBalancing):
        return value
    if isinstance(value, bool):
        return LoadBalancing() if value else None
    raise ValueError(
        f"Invalid `load_balancing`. Received: {value!r}. Expected: True, False or a "
        "tfdist.strategies.LoadBalancing(...)."
    )


def checked_shares(shares: Any, workers: int) -> tuple[float, ...] | None:
    """Returns a strategy's `shares` as positive numbers, one for each worker, or `None` if it has none.

    >>> checked_shares([1, 3], 2)
    (1.0, 3.0)
    """
    if shares is None:
        return None
    values = list(shares) if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    if len(values) != workers or not all(is_number(share, at_least=0) and share > 0 for share in values):
        raise ValueError(
            f"Invalid `shares`. Received: shares={shares!r} with {workers} workers. Expected: one positive number for "
            "each worker, by rank, such as [1, 3]: the second worker computes three times as many rows as the first."
        )
    return tuple(float(share) for share in values)
