"""Which replicas are wrong by the majority of all, and what follows for their workers: for weights and gradients."""

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tfdist.training.strategy_protocol import TrainingStrategy

_log = logging.getLogger("tfdist")
RESTART = "Restart the workers from a checkpoint, as `tfdist run --max-restarts` with FailureRecovery does."
TEST_MEMORY = "If it occurs again on the same host, test its memory"
Voter = TypeVar("Voter", bound=tuple[int, ...])  # the rank of a worker, the number of its device, and more


class DifferentReplicasError(RuntimeError):
    """Replicas have computed or hold different values that are equal on all replicas.

    Attributes:
        ranks: The workers with other values than the majority; all workers if there is no majority.
    """

    def __init__(self, message: str, ranks: Iterable[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Verdict:
    """What the values of all voters say.

    Attributes:
        majority: The value that more than half of the voters have; `None` if there is none.
        differing: The other voters: tuples that begin with the rank of a worker and the number of its device. Without a
            majority all voters.
    """

    majority: Any
    differing: tuple[Any, ...] = ()


def vote(values: Mapping[Voter, Hashable]) -> Verdict:
    """Decides by one value of each voter.

    >>> vote({(0, 0): 5, (1, 0): 5, (2, 0): 7})
    Verdict(majority=5, differing=((2, 0),))
    >>> vote({(0, 0): 5, (1, 0): 7})
    Verdict(majority=None, differing=((0, 0), (1, 0)))
    """
    if not values:
        return Verdict(None)
    most_common, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return Verdict(None, tuple(sorted(values)))
    return Verdict(most_common, tuple(sorted(voter for voter, own in values.items() if own != most_common)))


def values_of_replicas(
    strategy: TrainingStrategy, own: np.ndarray, *, has_values: bool = True
) -> dict[tuple[int, int], np.ndarray]:
    """Exchanges int64 values `[devices, N]` of this worker; returns `[N]` for each replica, by rank and device.

    All workers call this. Those that do not train at the moment, and those without `has_values`, are left out.
    """
    counts = strategy.replicas_of_workers
    sent = np.zeros([max(counts), own.shape[1] + 1], np.int64)
    sent[: len(own), 0], sent[: len(own), 1:] = has_values, own
    received = strategy.values_of_workers(sent.reshape(-1)).reshape(len(counts), *sent.shape)
    return {(rank, device): row[1:] for rank, rows in enumerate(received) for device, row in enumerate(rows) if row[0]}


def name_of(strategy: TrainingStrategy, replica: Sequence[int]) -> str:
    """Returns how messages name a replica."""
    rank, device = replica[:2]
    return f"worker {rank}" if strategy.replicas_of_workers[rank] == 1 else f"worker {rank}, device {device}"


def exclude_workers(
    strategy: TrainingStrategy, error: type[DifferentReplicasError], message: str, ranks: Sequence[int]
) -> None:
    """Ends the workers `ranks`, or all if these cannot be lost. `message` has a "%s" for what follows.

    Raises:
        DifferentReplicasError: `error`, on each worker that ends. The others log a warning.
    """
    if not strategy.may_lose_workers:
        raise error(message % RESTART, ranks)
    if strategy.rank not in ranks:
        _log.warning(message, "These workers leave; started again, they join with the state of the others.")
        return
    strategy.leave_others()
    raise error(message % "The others train on. Start this worker again, as `tfdist run --elastic` does.", ranks)
