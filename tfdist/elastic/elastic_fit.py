"""What an elastic training does in `fit`: sends its state to workers that join, loads it on them, leaves when asked."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import keras

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.data_position.position import Position
from tfdist.data_position.resumable_iterator import start_at_epoch, training_iterator
from tfdist.elastic.elastic_coordination import ElasticCoordination
from tfdist.elastic.leave_signals import LeaveSignals
from tfdist.elastic.received_state import ReceivedState, encode_state
from tfdist.elastic.state_exchange import StateExchange
from tfdist.elastic.step_transactions import StepTransactions
from tfdist.elastic.step_variables import accumulates, variables_of_steps
from tfdist.keras_internals.epoch_iterator import last_step
from tfdist.keras_internals.keras_callbacks import LastCallback, has_own_code_before_steps
from tfdist.keras_internals.saved_files import continue_files
from tfdist.recovery.preemption import exit_process
from tfdist.recovery.training_state import TrainingProgress, TrainingState, state_of_fit
from tfdist.recovery.variable_copies import HostViews


def reject_backups(callbacks: Sequence[Any]) -> None:
    """Refuses Keras' `BackupAndRestore`: a worker that starts later would restore what the others have left.

    Raises:
        ValueError: There is one.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "A worker that joins an elastic training takes the state of another one. Received: "
                f"{type(callback).__name__} in the callbacks of `fit`, with which it would restore a backup that the "
                "others have left behind. Expected: `FailureRecovery`, which restores only where all workers begin "
                "together. Use it in place of this one."
            )


class Recovery(Protocol):
    """What an elastic `fit` asks of the callback that saves and restores the training."""

    @property
    def progress(self) -> TrainingProgress:
        """How far the training is."""
        ...

    @property
    def handled_signals(self) -> Sequence[int]:
        """The signals by which a worker is asked to leave."""
        ...

    @property
    def is_asked_to_exit(self) -> bool:
        """Whether the program has asked this worker to leave."""
        ...

    def report_saves(self, report: Callable[[int, int], None]) -> None:
        """Calls `report` with the number and the step of each checkpoint that this worker has committed."""
        ...

    def state_to_join(self) -> dict[str, Any]:
        """Returns, as JSON, what a worker that joins needs to save with the others."""
        ...

    def join(self, progress: TrainingProgress, state: dict[str, Any]) -> None:
        """This worker has the state of another one, with its `progress` and its `state_to_join`."""
        ...

    def train_alone(self) -> None:
        """The others are in a later `fit`: this worker trains by itself, and saves nothing."""
        ...

    def save_to_leave(self) -> None:
        """Saves after the last step and waits until it is written. All workers call this, and leave."""
        ...

    def finish_saves(self) -> None:
        """Waits for what is being written."""
        ...


class ElasticFit(LastCallback):
    """The callback that each `fit` of an elastic strategy has.

    Args:
        transactions: Runs the steps.
        coordination: Knows which workers save.
        trace: Traces the training step of a model for batches of a structure of `tf.TypeSpec`s.
        take_no_rows: Called with the model on a worker that has the state of another one: it computes no rows, and has
            counted none.
    """

    def __init__(
        self,
        transactions: StepTransactions,
        coordination: ElasticCoordination,
        trace: Callable[[Any, Any], None],
        take_no_rows: Callable[[Any], None],
    ) -> None:
        super().__init__()
        self._group = transactions.group
        self._transactions, self._coordination = transactions, coordination
        self._trace, self._take_no_rows = trace, take_no_rows
        self._recoveries: list[Recovery] = []
        self._exchange = StateExchange(transactions)
        self._heartbeat: Heartbeat | None = None
        self._is_first = False  # whether this worker writes the files of callbacks
        self._received: ReceivedState | None = None
        self._is_asked_to_leave = False  # no `threading.Event`, whose lock a handler of signals could wait for
        self._signals = LeaveSignals(self._ask_to_leave)

    def on_train_begin(self, logs: Any = None) -> None:
        reject_backups(self.neighbours)
        last: list[Any] = [callback for callback in self.neighbours if isinstance(callback, LastCallback)]
        self._recoveries = [callback for callback in last if callback.restores_training]
        self._is_first = self._group.is_first
        self._iterator = training_iterator(self.model)
        self._progress, self._logs = self._recoveries[0].progress if self._recoveries else TrainingProgress(), None
        self._transactions.may_join |= not accumulates(self.model)
        self._training_state()  # creates what the first step would create, and could not take back
        if self._transactions.is_alone:
            self._join()
        elif self._transactions.changes.joined:
            self._transactions.run_alone(self._take_values_of_oldest)
        numbers = {number for recovery in self._recoveries for number in recovery.handled_signals}
        self._signals.handle(numbers if self._recoveries else {signal.SIGTERM})
        self._iterator.on_fit_end(self._signals.restore)
        self._heartbeat = Heartbeat.of_training(self._progress.step)
        if self._heartbeat is not None:
            for recovery in self._recoveries:
                recovery.report_saves(self._heartbeat.saved)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._progress = self._progress.in_epoch(epoch)
        if self._received is not None:
            received, self._received = self._received, None
            # Other callbacks and Keras have now reset metrics and moved schedules, as the others had at this place.
            self._load(received)
            self._exchange.replay(received)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._progress, self._logs = self._progress.after_batch(last_step(self.model, batch)), logs
        self._report()
        if self._group.is_first and not self._is_first:
            self._is_first = True
            continue_files(self.others)
        self._exchange.give(self._encoded_state)
        self._leave_if_asked()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._progress, self._logs = self._progress.after_epoch(), None

    def on_test_begin(self, logs: Any = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.phase("validation")

    def on_train_end(self, logs: Any = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.phase("finished")
            self._heartbeat = None

    def _report(self) -> None:
        """Reports progress to the supervisor, and changes of the workers once this one is one of them."""
        if self._heartbeat is not None and self._group.membership.is_member:
            self._heartbeat.step(self._progress.step)
            self._exchange.report(self._heartbeat)

    def _join(self) -> None:
        """Loads the state of a worker that trains. If the others are in a later `fit`, this worker trains by itself."""
        received = self._exchange.ask(self._trace_step)
        if received is None:
            for recovery in self._recoveries:
                recovery.train_alone()
            return
        progress = TrainingProgress(**received.metadata["progress"])
        self._iterator.resume_at(Position.from_json(received.metadata["position"]), replay=True)
        start_at_epoch(self.model, progress.epoch)
        self._load(received)
        for recovery, state in zip(self._recoveries, received.metadata["recoveries"], strict=True):
            recovery.join(progress, state)
        self._progress, self._received = progress, received

    def _trace_step(self) -> None:
        """Traces the training step now if nothing but Keras and tfdist has a part in what precedes the first one."""
        if any(has_own_code_before_steps(callback) for callback in self.others):
            return
        try:
            self._trace(self.model, self._iterator.element_spec)
        except Exception:  # the first step raises it, where errors are explained
            self.model.make_train_function(force=True)

    def _load(self, received: ReceivedState) -> None:
        rank, ranks = self._group.rank, len(self._group.addresses)
        state = self._training_state()
        state.adopt_accumulation_steps(received)  # `GradientAccumulation` sets them only when the epoch begins
        state.restore(received, rank, ranks, metrics=False)
        self._transactions.use_common_states(received.metadata["common_states"])
        self._take_no_rows(self.model)

    def _take_values_of_oldest(self) -> None:
        """Makes the model equal on all: a worker that has joined may have trained it by itself in an earlier `fit`."""
        for variable in variables_of_steps(self.model):
            value = variable.read_value()
            variable.assign(self._transactions.value_of_oldest(value))

    def _training_state(self) -> TrainingState:
        spec, timeout = self._iterator.element_spec, self._group.timeout_seconds
        return state_of_fit(self.model, self.others, spec, timeout_seconds=timeout, copies=HostViews())

    def _encoded_state(self, metadata: dict[str, Any]) -> list[Any]:
        snapshot = self._training_state().snapshot({}, is_chief=True)
        metadata["progress"] = asdict(self._progress)
        metadata["position"] = self._iterator.position(self._progress.next_step, self._logs).to_json()
        metadata["recoveries"] = [recovery.state_to_join() for recovery in self._recoveries]
        return encode_state(snapshot, metadata)

    def _leave_if_asked(self) -> None:
        """Ends this process if it was asked to before the last step: then the others know it.

        If all leave, they save first. Nobody leaves when the training ends with this step, as its end saves more.
        """
        membership = self._group.membership
        if any(recovery.is_asked_to_exit for recovery in self._recoveries):
            self._ask_to_leave()
        leaves = membership.number in membership.leaving if membership.is_member else self._is_asked_to_leave
        if not leaves or (self._recoveries and self.model.stop_training):
            return
        if membership.leaving.issuperset(self._group.connected_view.members) and membership.is_member:
            for recovery in self._recoveries:
                recovery.save_to_leave()
            if self._recoveries:
                self._coordination.wait_for_commit(self._group.timeout_seconds)
        self._coordination.leave()
        for recovery in self._recoveries:
            recovery.finish_saves()
        exit_process(PREEMPTED_EXIT_CODE, self.others, is_alone=False)

    def _ask_to_leave(self) -> None:
        self._is_asked_to_leave = True
        self._group.membership.leave_after_step()
