"""How the workers of an elastic training agree on what `FailureRecovery` restores and saves."""

import json
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from tfdist.checkpoint import SavingRanks
from tfdist.elastic.step_transactions import StepTransactions
from tfdist.membership.decisions import View

_SAVES_OF_STEP = 4  # at most: after a step, at the end of its epoch, at the end of the training, to leave
_LATE_SECONDS = 10.0  # for which a worker that has left waits for files of others
_log = logging.getLogger("tfdist")


class ElasticCoordination:
    """The `Coordination` of an elastic training: the oldest of the workers that train is the chief.

    What the chief decides is exchanged in a step by itself. So it counts on all workers or is decided again, by the
    next oldest if the chief is lost, and a worker that joins later repeats it.

    Args:
        transactions: Runs the steps.
        divide_metrics: Moves the sums of metrics over all workers to one of them; called with whether it is this one.
        view_of_sums: Returns for a model whose members have its accumulated gradients: see `ElasticAccumulation`.
    """

    def __init__(
        self,
        transactions: StepTransactions,
        divide_metrics: Callable[[bool], None],
        view_of_sums: Callable[[Any], View | None] = lambda model: None,
    ) -> None:
        self._transactions, self._group = transactions, transactions.group
        self._divide_metrics, self._view_of_sums = divide_metrics, view_of_sums
        self.rank, self.num_workers = self._group.rank, len(self._group.addresses)
        self._left_at: float | None = None

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the oldest of those that have run the last step."""
        return self._transactions.is_oldest

    @property
    def starts_late(self) -> bool:
        """Whether the others train already, so that this worker takes their state and restores nothing."""
        return self._transactions.is_alone

    def wait_for_chief(self, timeout_seconds: float) -> None:
        """Waits for nothing: a worker that has another program makes other exchanges."""

    def decide(self, name: str, find: Callable[[], Any]) -> Any:
        """Returns what `find` returns to the chief, any JSON. A worker that trains by itself decides itself."""
        del name
        if self.starts_late:
            return find()
        return self._transactions.run_alone(lambda: self._decide_in_step(find))

    def broadcast(self, name: str, value: Any) -> Any:
        """Returns the chief's `value`, any JSON."""
        return self.decide(name, lambda: value)

    def _decide_in_step(self, find: Callable[[], Any]) -> Any:
        encoded = json.dumps(find()).encode() if self._transactions.is_oldest else b""
        size = int(self._transactions.value_of_oldest(tf.constant(len(encoded), tf.int64)))
        characters = tf.constant(list(encoded) or [0] * size, tf.int64)
        return json.loads(bytes(self._transactions.value_of_oldest(characters).numpy().tolist()))

    def sequence_of_save(self, first: int, following: int) -> int:
        """Returns the number of the checkpoint to save. It follows from the steps that count, which all have counted.

        So workers that save at different steps never write to one checkpoint, and one that joins knows it, too.
        """
        return max(following, first + _SAVES_OF_STEP * self._group.membership.committed_steps)

    def begin_save(self, model: Any, *, is_last: bool) -> SavingRanks | None:
        """Returns the workers that have run the last step, the oldest first; `None` if this one was not among them.

        Within an accumulation of gradients each worker has a part of the sums, so the save needs those of all that have
        run the last training step. `None` if the workers are others now, on all of them.

        The chief gets the sums of all metrics: the part of another worker may be missing in the checkpoint. It waits
        for the part of a worker as long as it reaches that one, and before all leave, as long as no other is lost: one
        that has not got to know that all leave makes another step.
        """
        view, membership = self._group.connected_view, self._group.membership
        if membership.number not in view.members:
            return None
        view_of_sums = self._view_of_sums(model)
        if view_of_sums not in (None, view):
            if membership.number == view.members[0]:
                _log.warning(
                    "A checkpoint that is due is not saved: other workers train than those that have accumulated "
                    "gradients in the last training step. Earlier checkpoints are intact, and the next one that is due "
                    "is saved."
                )
            return None
        self._divide_metrics(membership.number == view.members[0])
        numbers = {number % self.num_workers: number for number in view.members}

        def lost() -> Collection[int]:
            is_over = is_last and not membership.is_in(view)
            return [rank for rank, number in numbers.items() if is_over or not self._may_write(number)]

        return SavingRanks(tuple(numbers), lost, needs_all=view_of_sums is not None)

    def _may_write(self, number: int) -> bool:
        has_waited = self._left_at is not None and time.monotonic() > self._left_at + _LATE_SECONDS
        return self._group.membership.reaches(number) and not has_waited

    def wait_for_commit(self, timeout_seconds: float) -> None:
        """Waits until the chief has saved, and left; at most until a worker is lost. All leave after this."""
        view, end = self._group.connected_view, time.monotonic() + timeout_seconds
        while not self.is_chief and self._group.membership.is_in(view) and time.monotonic() < end:
            time.sleep(0.02)

    def leave(self) -> None:
        """Leaves the others: for them this worker has ended."""
        self._left_at = time.monotonic()
        self._group.close()
