"""Steps that are written on all workers that go on, or on none: what was written is taken back if one is lost."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

from tfdist.exchange.exchange_errors import ExchangeError, WorkerLostError
from tfdist.membership.decisions import View
from tfdist.membership.membership import Membership
from tfdist.utils.temporary_values import setting_attributes

_Result = TypeVar("_Result")


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
        return exchange() if self._is_running else self.run(exchange, ())

    def run(self, step: Callable[[], _Result], variables: Sequence[tf.Variable]) -> _Result:
        """Runs a step, which all workers run, until it counts.

        Args:
            step: Computes and writes; called again after a loss, with the same values in `variables`.
            variables: All that the step may write.

        Raises:
            ExchangeError: This worker cannot go on: see `Membership.wait_for_view`.
        """
        while True:
            self._follow_view()
            with tf.init_scope():
                before = [variable.read_value() for variable in variables]  # shares the memory until a step writes it
            try:
                with setting_attributes(self, _is_running=True):
                    result = step()
            except (ExchangeError, tf.errors.OpError) as error:
                lost = self._failure()
                if not isinstance(lost, WorkerLostError):
                    raise
                self._take_back(variables, before)
                self._membership.report_failure(self._view, lost.rank)
                del error
            else:
                if self._membership.commit():
                    return result
                self._take_back(variables, before)
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

    @staticmethod
    def _take_back(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
        with tf.init_scope():
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
