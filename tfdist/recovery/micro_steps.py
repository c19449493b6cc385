"""Gradient accumulation that goes on with another number of micro-steps an update."""

from typing import NamedTuple


class MicroSteps(NamedTuple):
    """Where an accumulation goes on.

    Attributes:
      done: micro-steps since training began, in the new number of them an update.
      factor: what the accumulators are multiplied by.
    """

    done: int
    factor: float


def converted(count: int, old_steps: int, new_steps: int) -> MicroSteps:
    """Converts a number of micro-steps; the number of updates stays.

    With `n` times fewer replicas and `n` times more micro-steps an update, an update that was half done is half done.
    Where its part is not a whole number of micro-steps it is rounded down, and the mean gradient of what was
    accumulated counts as so many; of less than one nothing is left.

    >>> converted(9, old_steps=2, new_steps=4)
    MicroSteps(done=18, factor=2.0)
    >>> converted(11, old_steps=4, new_steps=2)
    MicroSteps(done=5, factor=0.3333333333333333)
    >>> converted(7, old_steps=4, new_steps=4)
    MicroSteps(done=7, factor=1.0)
    """
    updates, remainder = divmod(count, old_steps)
    new_remainder = remainder * new_steps // old_steps
    return MicroSteps(updates * new_steps + new_remainder, new_remainder / remainder if remainder else 1.0)
