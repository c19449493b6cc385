"""A worker in a custom loop of an elastic training: its steps, and what it does between them."""

import functools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.data_position.loop_passes import LoopPosition
from tfdist.elastic.leave_signals import LeaveSignals
from tfdist.elastic.loop_state import LoopState
from tfdist.elastic.received_state import ReceivedState, encode_state
from tfdist.elastic.state_exchange import StateExchange
from tfdist.elastic.step_transactions import StepTransactions, WrittenVariables
from tfdist.recovery.preemption import exit_process


class LoopMember:
    """Runs the steps of a loop as transactions, sends its state to workers that join, and takes over that of others.

    Args:
        transactions: Runs the steps.
        state: What the steps write.
        others: Returns further variables that they write.
        overwritten: Returns those that each step sets.
        take_no_rows: Called on a worker that has the state of another one.
        share_metrics: Gives the sums of metrics to one of the workers.
    """

    def __init__(
        self,
        transactions: StepTransactions,
        state: LoopState,
        *,
        others: Callable[[], Sequence[Any]],
        overwritten: Callable[[], Sequence[Any]],
        take_no_rows: Callable[[], None],
        share_metrics: Callable[[], None],
    ) -> None:
        self._transactions, self._state, self._group = transactions, state, transactions.group
        self._others, self._overwritten = others, overwritten
        self._take_no_rows, self._share_metrics = take_no_rows, share_metrics
        self._heartbeat: Heartbeat | None = None
        self._exchange: StateExchange | None = None  # from `begin` on
        self._received: ReceivedState | None = None
        self._is_asked_to_leave = False  # no `threading.Event`, whose lock a handler of signals could wait for

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function whose calls are steps, which count on all workers or on none."""
        written = WrittenVariables(lambda: [*self._state.variables, *self._others()], self._overwritten)

        def compute(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._state.store_metrics()
            return result

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._transactions.is_running:
                return function(*args, **kwargs)
            if not tf.executing_eagerly():
                raise ValueError(
                    "A step of an ElasticLoop is taken back, and computed again, by Python. Received: a call of "
                    f"{getattr(function, '__name__', function)!r} within a `tf.function`. Expected: a call by the "
                    "loop itself. Decorate the outer function with `loop.step`, and leave the inner one as it is."
                )
            return self._transactions.run(lambda: compute(*args, **kwargs), written)

        return run

    def begin(self) -> LoopPosition | None:
        """Begins the loop. Returns the position of the others if this worker joins them there.

        Raises:
            JoinError, TimeoutError: See `ElasticGroup.ask_for_state`.
        """
        transactions = self._transactions
        self._exchange = StateExchange(transactions)
        self._heartbeat = Heartbeat.from_environment()
        if self._heartbeat is not None:
            self._heartbeat.start()
        if transactions.is_alone:
            self._received = self._exchange.ask()
            return None if self._received is None else LoopPosition.from_json(self._received.metadata["position"])
        if transactions.changes.joined:
            # A worker that has joined may have trained the same model by itself before.
            transactions.run_alone(lambda: self._state.equalize(transactions.value_of_oldest))
            self._share_metrics()
        return None

    def resume(self) -> None:
        """Loads the state of which `begin` has returned the position, and repeats the others' steps from now on."""
        assert self._received is not None and self._exchange is not None
        received, self._received = self._received, None
        self._state.restore(received, self._group.rank, received.metadata["sums"])
        self._transactions.use_common_states(received.metadata["common_states"])
        self._take_no_rows()
        self._exchange.replay(received)

    def after_batch(self, position: Callable[[], LoopPosition]) -> None:
        """Called after a batch, when all that belongs to it is done."""
        assert self._exchange is not None
        if self._heartbeat is not None:
            self._exchange.report(self._heartbeat)
        self._exchange.give(lambda metadata: self._encoded_state({**metadata, "position": position().to_json()}))
        if self._is_asked_to_leave:
            self._group.close()
            exit_process(PREEMPTED_EXIT_CODE, [], is_alone=False)

    def handle_signal(self) -> Callable[[], None]:
        """Makes SIGTERM let this worker leave after a batch, unless the program handles the signal itself.

        Returns:
            What ends that.
        """
        signals = LeaveSignals(self._ask_to_leave)  # not that of a pass around this one
        signals.handle([signal.SIGTERM])
        return signals.restore

    def _ask_to_leave(self) -> None:
        self._is_asked_to_leave = True

    def _encoded_state(self, metadata: dict[str, Any]) -> list[Any]:
        return encode_state(self._state.snapshot(), {**metadata, "sums": self._state.sums_of_metrics()})
