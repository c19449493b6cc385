"""Steps that are written on all workers that go on, or on none: what was written is taken back if one is lost."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from tfdist.exchange.exchange_errors import ExchangeError, WorkerLostError
from tfdist.membership.decisions import View
from tfdist.membership.membership import Membership
from tfdist.utils.temporary_values import setting_attributes

_STEPS_THAT_CREATE = 2
_Result = TypeVar("_Result")


class WrittenVariables:
    """All that the steps of a function may write, on this worker.

    Args:
        find: Returns them. It is asked before the first two steps: the first may create some.
    """

    def __init__(self, find: Callable[[], Sequence[tf.Variable]]) -> None:
        self._find, self._steps = find, 0

    def read(self) -> Sequence[tf.Tensor]:
        """Returns the values before a step. They share the memory of the variables until the step writes these."""
        if self._steps < _STEPS_THAT_CREATE:
            self._variables = list(self._find())
            self._read = tf.function(lambda: [variable.read_value() for variable in self._variables])
        self._steps += 1
        with tf.init_scope():
            return self._read() if self._variables else ()

    def take_back(self, values: Sequence[tf.Tensor]) -> None:
        """Gives the variables the values that `read` has returned."""
        with tf.init_scope():
            for variable, value in zip(self._variables, values, strict=True):
                variable.assign(value)


NOTHING = WrittenVariables(tuple)


class StepTransactions:
    """Runs steps, and again those during which a worker is lost, on the same data with the workers that are left.

    Args:
        membership: Who trains.
        failure: Returns the error that ended the present exchange with the other workers, if there is one.
        connect: Connects this worker with the members of a view, and gives them their rows. It may raise a
            `WorkerLostError` if one of them is lost meanwhile.
    """

    def __init__(
        self,
        membership: Membership,
        failure: Callable[[], ExchangeError | None],
        connect: Callable[[View], None],
    ) -> None:
        self._membership, self._failure, self._connect = membership, failure, connect
        self._view = membership.view
        self._is_running = False
        self.lost_workers = self.repeated_steps = 0

    def run_alone(self, exchange: Callable[[], _Result]) -> _Result:
        """Runs an exchange; outside of a step it is one by itself."""
        return exchange() if self._is_running else self.run(exchange, NOTHING)

    def run(self, step: Callable[[], _Result], written: WrittenVariables) -> _Result:
        """Runs a step, which all workers run, until it counts.

        Args:
            step: Computes and writes; called again after a loss, when what it has `written` is taken back.
            written: All that it may write.

        Raises:
            ExchangeError: This worker cannot go on: see `Membership.wait_for_view`.
        """
        while True:
            self._follow_view()
            before = written.read()
            try:
                with setting_attributes(self, _is_running=True):
                    result = step()
            except (ExchangeError, tf.errors.OpError) as error:
                lost = self._failure()
                if not isinstance(lost, WorkerLostError):
                    raise
                written.take_back(before)
                self._membership.report_failure(self._view, lost.rank)
                del error
            else:
                if self._membership.commit():
                    return result
                written.take_back(before)
            self.repeated_steps += 1

    def _follow_view(self) -> None:
        """Connects this worker with those that the workers have agreed on."""
        while (view := self._membership.wait_for_view()) != self._view:
            try:
                self._connect(view)
            except WorkerLostError as error:
                self._membership.report_failure(view, error.rank)
                continue
            self.lost_workers += len(set(self._view.members) - set(view.members))
            self._view = view
