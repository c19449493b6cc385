"""A worker in a custom loop of an elastic training: its steps, and what it does between them."""

import functools
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfdist.checkpoint.shard import Shard
from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.elastic.leave_signals import LeaveSignals
from tfdist.elastic.loop_state import LoopState
from tfdist.elastic.received_state import ReceivedState, encode_state
from tfdist.elastic.state_exchange import StateExchange
from tfdist.elastic.step_transactions import StepTransactions, WrittenVariables
from tfdist.recovery.preemption import exit_process
from tfdist.recovery.training_state import Snapshot


@dataclass(frozen=True)
class LoopPosition:
    """A position between two batches of a loop.

    >>> position = LoopPosition(epoch=2, batch=5, finished=((0, 8), (0, 8)))
    >>> LoopPosition.from_json(position.to_json()) == position
    True

    Attributes:
        epoch: The present epoch.
        passes: How many passes over data have ended in this epoch, besides those within other passes.
        batch: How many batches the present pass has drawn.
        steps: How many batches all passes have drawn.
        dataset: The dataset of the present pass: its number, in the order in which the loop has used them first.
        finished: The dataset and the number of batches of each pass that has ended.
        order: What determines the order of the dataset, as JSON.
        seeds: The seeds of all datasets that have been used, or the states of loaders between two passes, as JSON.
    """

    epoch: int = 0
    passes: int = 0
    batch: int = 0
    steps: int = 0
    dataset: int = 0
    finished: tuple[tuple[int, int], ...] = ()
    order: Any = None
    seeds: tuple[Any, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> "LoopPosition":
        """Returns the position that `to_json` has written."""
        finished = tuple((int(dataset), int(count)) for dataset, count in json["finished"])
        return cls(**{**json, "finished": finished, "seeds": tuple(json["seeds"])})


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
        self._state.restore(received.read_shared())
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

    def _encoded_state(self, metadata: dict[str, Any]) -> Callable[[], list[Any]]:
        return encode_state(Snapshot(self._state.snapshot(), Shard({}), None, lambda: None), metadata)
