"""Accumulated gradients: what a lost worker had added up since the last update is computed again by those left."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from tfdist.elastic.step_transactions import StepTransactions, Values, Written, WrittenVariables
from tfdist.exchange.exchange_errors import ExchangeError
from tfdist.membership.decisions import NO_VIEW, View

_MISSING = frozenset({-1})  # no worker has this number
Counts = Mapping[int, tuple[int, int]]
"""Of optimizers by their `id`: the number of steps, and the number of steps for which each accumulates."""
_Result = TypeVar("_Result")


class Sums(Written, Protocol):
    """Where gradients are added up."""

    def clear(self) -> None:
        """Makes the sums zero."""
        ...


class Accumulators(WrittenVariables):
    """The variables in which the replicas of this worker add up gradients."""

    def clear(self) -> None:
        """Makes the sums zero."""
        self.take_back([(variable, tf.zeros_like(value)) for variable, value in self.read()])


class ElasticAccumulation:
    """The training steps of a model since the last one after which nothing was accumulated.

    Each worker adds up the gradients of the rows that it computes, and only the last step of an accumulation exchanges
    the sums. If a worker is lost before, the others clear their sums and compute the earlier steps again, with the
    shares that they have now, as a part of the present step: all of it counts, or nothing. Everything else that the
    earlier steps have written stays as it is, with its bits: logs and metrics were shown, and callbacks may have
    changed the rest. For that this keeps the batches of the steps, and the values before each of them; what none of the
    steps changes, as most often the weights, takes no memory.

    A worker that joins repeats steps without rows, so that its sums are zero, and those of the others stay complete.
    It becomes one of them after it has repeated a step that begins an accumulation, and so could compute that again.

    It is what `StepTransactions.run` asks for what its steps write.

    Args:
        transactions: Runs the steps.
        counts: Returns how many steps each optimizer that accumulates has made, and over how many it accumulates.
        shares: A variable that divides rows among the workers; steps that are computed again leave it as it is.
    """

    def __init__(self, transactions: StepTransactions, counts: Callable[[], Counts], shares: Any = None) -> None:
        self._transactions, self._counts, self._shares = transactions, counts, shares
        self._written: Written
        self._sums: Sums
        self._before: Values = ()  # the values before the present step
        self._steps: list[tuple[Callable[[], Any], Values]] = []
        self._has_all_steps = True
        self._is_within = False  # whether the present step is another one than the first of an accumulation
        self._last: Counts | None = None  # after the last step
        self._view = NO_VIEW  # in which the last step was computed; `NO_VIEW` for one that was repeated
        # Workers whose rows are in their sums, all of them; `None` if this worker does not know.
        self._holders: frozenset[int] | None = frozenset()
        self._seconds: float | None = None  # for which earlier steps were computed again, if they were

    @property
    def view_of_sums(self) -> View | None:
        """The view of the last training step, whose members have all sums together, each a part.

        `None` if nothing is accumulated; `NO_VIEW` if this worker has not made the step with others, or does not know.
        """
        counts = self._counts()
        if not _is_incomplete(counts):
            return None
        return self._view if counts == self._last else NO_VIEW

    def use(self, written: Written, sums: Sums) -> None:
        """Begins another function of steps, with what they may write besides sums."""
        self._written, self._sums = written, sums

    def has_state_of_another(self) -> None:
        """This worker has the state of another one, and its sums are zero: it repeats steps from here on."""
        self._last = self._counts()
        self._forget(holders=None)
        self._has_all_steps = self._transactions.may_join = not _is_incomplete(self._last)

    def run(self, step: Callable[[], _Result]) -> _Result:
        """Runs a training step, or an update between two of them, until it counts: see `StepTransactions.run`.

        Raises:
            ExchangeError: A worker is lost with gradients that it had accumulated before this training, or see
                `StepTransactions.run`.
        """
        counts = self._counts()
        self._is_within = _is_incomplete(counts)
        if not self._is_within:
            self._begin()
        elif counts != self._last:  # restored, or set by the program, on each worker its part
            members = frozenset(self._transactions.view.members)
            self._forget(holders=members if len(members) == len(self._transactions.group.addresses) else _MISSING)
            self._has_all_steps = False
        self._transactions.may_join = self._has_all_steps
        result = self._transactions.run(lambda: self._attempt(step), self)
        self._add(step)
        return result

    def read(self) -> tuple[Values, Any]:
        """Returns the values before a step."""
        self._before = self._written.read()
        return self._before, self._sums.read()

    def take_back(self, values: tuple[Values, Any]) -> None:
        """Gives back the values that `read` has returned."""
        before, sums = values
        self._written.take_back(before)
        self._sums.take_back(sums)

    def trace(self, write_after: Callable[[Sequence[Any]], set[int]]) -> None:
        """Lets nothing wait: all values before a step are kept, as later steps may need them."""
        del write_after

    def _begin(self) -> None:
        self._forget(holders=frozenset())
        self._has_all_steps = True

    def _forget(self, *, holders: frozenset[int] | None) -> None:
        self._steps, self._view, self._holders = [], NO_VIEW, holders

    def _attempt(self, step: Callable[[], _Result]) -> _Result:
        self._seconds = None
        if not self._transactions.trains:
            self._before = self._written.read()
        elif self._is_within and self._transactions.view != self._view:
            self._complete_sums()
        return step()

    def _complete_sums(self) -> None:
        """Computes the earlier steps again if a worker is lost whose rows the sums lack now.

        All workers call this in the first step of a view, if it is within an accumulation: also one that has just
        joined, which does not know whose rows are in the sums.
        """
        transactions, holders = self._transactions, self._holders
        is_lost = holders is not None and not holders.issubset(transactions.view.members)
        lost, know, lack = transactions.numbers_with(is_lost, holders is not None, not self._has_all_steps)
        if lost or not know:
            if lack:
                raise ExchangeError(
                    "A worker was lost with gradients that it had accumulated, and not all others have the batches of "
                    "these. Received: a loss within the micro-steps of an update that had begun before this training. "
                    "Expected: a loss after that update. Start the workers again."
                )
            self._compute_again()
        transactions.group.log.take()  # workers that join have no part in it

    def _compute_again(self) -> None:
        began = time.monotonic()
        self._sums.clear()
        for step, before in self._steps:
            self._written.take_back([entry for entry in before if entry[0] is not self._shares])
            self._transactions.compute_again(step)
        self._written.take_back(self._before)
        self._seconds = time.monotonic() - began

    def _add(self, step: Callable[[], Any]) -> None:
        """The present step counts."""
        transactions = self._transactions
        if self._seconds is not None:
            more = {"repeated_steps": len(self._steps), "seconds": self._seconds}
            transactions.changes = transactions.changes.plus(**more)
        before, self._before = self._before, ()
        self._last = self._counts()
        if not _is_incomplete(self._last):
            return self._begin()
        self._steps.append((step, before))
        if transactions.trains:
            # Those of the steps before, too: otherwise they were computed again.
            self._view, self._holders = transactions.view, frozenset(transactions.view.members)
        elif transactions.is_alone:
            self._holders = _MISSING  # this worker has added up all rows
        else:
            self._holders = None


def _is_incomplete(counts: Counts) -> bool:
    return any(made % steps for made, steps in counts.values())
