"""Workers as threads that add up their own rows over several steps, and exchange the sums in the last of them."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from thread_workers import ROWS, ThreadWorker, total_after

from tfdist.elastic.elastic_accumulation import ElasticAccumulation
from tfdist.exchange.worker_exchange import STEPS

MICRO_STEPS = 4
_STEPS_OF_EPOCH = 6  # after which a step of validation follows, also within an accumulation


class _Held:
    """A value that steps write."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self) -> Any:
        return [(self, self.value)]

    def take_back(self, values: Any) -> None:
        for held, value in values:
            held.value = value

    def clear(self) -> None:
        self.value = np.zeros_like(self.value)


class _Written(_Held):
    """What steps write besides sums: the total, of which each worker has the same, and the number of steps."""

    def __init__(self, values: Any, micro_steps: int) -> None:
        super().__init__((values, micro_steps))

    @property
    def values(self) -> Any:
        return self.value[0]


def micro_steps_after(step: int) -> int:
    """Returns how many training steps are among the first steps."""
    return step - step // (_STEPS_OF_EPOCH + 1)


class AccumulatingWorker(ThreadWorker):
    """A worker whose training step n adds `ROWS * n` to the total, at the end of an accumulation of `MICRO_STEPS`.

    Attributes:
        before_micro_step: Called within each training step with its number, also if it is computed again.
        again: The numbers of the training steps that it has computed again, within later ones.
        restored: After how many training steps it begins.
    """

    restored = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.before_micro_step: Callable[[int], None] = lambda number: None
        self.again: list[int] = []
        super().__init__(*arguments, **options)

    def total_after(self, step: int) -> int:
        micro_steps = micro_steps_after(step)
        return total_after(micro_steps - micro_steps % MICRO_STEPS)

    def _prepare(self) -> None:
        micro_steps = self.restored + micro_steps_after(self.membership.committed_steps)
        written = _Written(self._state.values, micro_steps)
        self._state: Any = written
        self._own_sums = _Held(np.zeros(4, np.int64))
        self._accumulation = ElasticAccumulation(self.transactions, lambda: {0: (written.value[1], MICRO_STEPS)})
        self._accumulation.use(written, self._own_sums)

    def _has_joined(self) -> None:
        self._prepare()
        self._accumulation.has_state_of_another()

    def _run_step(self) -> None:
        if not hasattr(self, "_accumulation"):
            self._prepare()
        step = self.membership.committed_steps + 1
        if step % (_STEPS_OF_EPOCH + 1) == 0:
            self.transactions.run(functools.partial(self._sum_rows, step), _Held(None))
            return
        self._present = self.restored + micro_steps_after(step)
        self._accumulation.run(functools.partial(self._micro_step, self._present))

    def _rows(self) -> int:
        return ROWS // len(self._ranks) if self._ranks else 0

    def _sum_rows(self, number: int) -> None:
        """Exchanges something, as each step does."""
        total = self.exchange.channel(STEPS).all_reduce(np.full(4, number * self._rows()))
        assert (total == ROWS * number).all(), (self.rank, number, total)

    def _micro_step(self, number: int) -> None:
        values, micro_steps = self._state.value
        assert micro_steps + 1 == number, (self.rank, micro_steps, number)
        if number != self._present:
            self.again.append(number)
        self.before_micro_step(number)
        self._sum_rows(number)
        own = self._own_sums.value + number * self._rows()
        if number % MICRO_STEPS == 0:
            values = values + self.exchange.channel(STEPS).all_reduce(own)
            own = np.zeros_like(own)
        self.after_exchange()
        self._own_sums.value, self._state.value = own, (values, number)
