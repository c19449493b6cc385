"""A worker in a custom loop of an elastic training: its steps, and what it does between them."""

import functools
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from tfdist.checkpoint.shard import Shard
from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.elastic.loop_state import LoopState
from tfdist.elastic.received_state import ReceivedState, encode_state
from tfdist.elastic.step_transactions import Changes, StepTransactions, WrittenVariables
from tfdist.membership.state_transfer import StateReceiver
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
        seeds: The seeds of all datasets that have been used, as JSON.
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
        self._number = -1
        self._heartbeat: Heartbeat | None = None
        self._reported: Changes | None = None
        self._received: tuple[StateReceiver, ReceivedState] | None = None
        self._is_asked_to_leave = threading.Event()

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
        self._number, transactions.fits = transactions.fits, transactions.fits + 1
        self._reported = Changes() if self._group.membership.is_member else None
        self._heartbeat = Heartbeat.from_environment()
        if self._heartbeat is not None:
            self._heartbeat.start()
        if transactions.is_alone:
            return self._join()
        if transactions.changes.joined:
            # A worker that has joined may have trained the same model by itself before.
            transactions.run_alone(lambda: self._state.equalize(transactions.value_of_oldest))
            self._share_metrics()
        return None

    def resume(self) -> None:
        """Loads the state of which `begin` has returned the position, and repeats the others' steps from now on."""
        assert self._received is not None
        (receiver, received), self._received = self._received, None
        self._state.restore(received.read_shared())
        self._transactions.use_common_states(received.metadata["common_states"])
        self._take_no_rows()
        self._transactions.replay(receiver, Changes(**received.metadata["changes"]))

    def after_batch(self, position: Callable[[], LoopPosition]) -> None:
        """Called after a batch, when all that belongs to it is done."""
        self._report()
        if self._group.donor.is_asked and self._group.membership.is_member:
            self._give_state(position)
        if self._is_asked_to_leave.is_set():
            self._group.close()
            exit_process(PREEMPTED_EXIT_CODE, [], is_alone=False)

    def handle_signal(self) -> Callable[[], None]:
        """Makes SIGTERM let this worker leave after a batch, unless the program handles the signal itself.

        Returns:
            What ends that.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return lambda: None
        signal.signal(signal.SIGTERM, lambda number, frame: self._is_asked_to_leave.set())

        def restore() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._is_asked_to_leave.is_set():
                signal.raise_signal(signal.SIGTERM)

        return restore

    def _report(self) -> None:
        changes = self._transactions.changes
        if self._heartbeat is None or not self._group.membership.is_member or changes == self._reported:
            return
        self._reported = changes
        self._heartbeat.membership(
            lost=changes.lost,
            joined=changes.joined,
            repeated_steps=changes.repeated_steps,
            seconds_lost=round(changes.seconds, 3),
        )

    def _join(self) -> LoopPosition | None:
        receiver = self._group.ask_for_state(self._number)
        if receiver is None:
            return None
        assert receiver.state is not None
        received = ReceivedState(receiver.state[1], len(self._group.addresses))
        self._received = receiver, received
        return LoopPosition.from_json(received.metadata["position"])

    def _give_state(self, position: Callable[[], LoopPosition]) -> None:
        for request in self._group.donor.requests():
            if request.fit < self._number:
                request.refuse(self._number)
            elif request.fit > self._number:
                self._group.donor.keep(request)
            else:
                try:
                    parts = self._state_parts(position())
                except Exception as error:  # this worker can train on
                    request.fail(f"{type(error).__name__}: {error}")
                    continue
                step = self._group.membership.committed_steps
                self._group.donor.send(request, step, functools.partial(list, parts))
                self._group.log.keep(True)

    def _state_parts(self, position: LoopPosition) -> list[Any]:
        metadata = {
            "position": position.to_json(),
            "changes": asdict(self._transactions.changes),
            "common_states": self._transactions.common_states(),
        }
        return encode_state(Snapshot(self._state.snapshot(), Shard({}), None, lambda: None), metadata)
