"""`FailureRecovery`: saves the training in the background and resumes it bit by bit after a failure."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from tfdist.callbacks.gradient_accumulation import GradientAccumulation
from tfdist.callbacks.strategy_support import check_strategies_early, warn_untested_on_tpu
from tfdist.callbacks.weight_comparison import WeightComparison
from tfdist.checkpoint import Checkpoint
from tfdist.cluster import seed_of_run
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.data_position.position import Position
from tfdist.data_position.resumable_iterator import patch_epoch_iterator, start_at_epoch, training_iterator
from tfdist.keras_internals.epoch_iterator import last_step
from tfdist.keras_internals.keras_callbacks import LastCallback
from tfdist.keras_internals.model_state import optimizers_of
from tfdist.keras_internals.running_fit import running_fit
from tfdist.keras_internals.scheduled_training import training_of
from tfdist.recovery.preemption import PreemptionHandler, RayTrainNotices
from tfdist.recovery.random_generators import drawn_before_fit
from tfdist.recovery.recovery_warnings import (
    InitialLearningRates,
    is_terminated_by_nan,
    warn_lost_callback_state,
    warn_other_seed,
    warn_signals_not_handled,
    warn_terminated_by_nan,
    warn_training_complete,
)
from tfdist.recovery.save_schedule import SaveInterval, SaveSchedule
from tfdist.recovery.storage_tiers import StorageTiers
from tfdist.recovery.training_saves import TrainingSaves, print_line
from tfdist.recovery.training_state import TrainingProgress, state_of_fit
from tfdist.recovery.worker_coordination import Coordination, WorkerCoordination
from tfdist.training.strategy_kinds import rank_and_num_workers
from tfdist.training.strategy_protocol import training_strategy


class FailureRecovery(LastCallback):
    """Saves checkpoints of the complete training state; `fit` resumes from the newest complete checkpoint.

    A training that is killed at any moment and started again ends with the same weights, bit by bit, as one that was
    not interrupted. Restored on every worker: weights, optimizer, accumulators, compression residuals, batch
    statistics, metrics of the current epoch, random generators, other callbacks, the History, and the position in the
    data. `fit` resumes in the middle of the epoch. `docs/guarantees.md` says what is guaranteed for each failure.

    Checkpoints are copied and written in the background: a step waits only if the previous checkpoint is still being
    written, and, where variables are on a GPU or TPU, for their copy to host memory. `fit` raises the error of a write
    at the next save or at its end. With several workers `directory` must be on a file system that they share, or an
    address on an object store; each worker writes its part. An object store that does not answer is a warning, and
    training continues; only the last save of `fit` must succeed (`docs/object_stores.md`). With
    `shared=False` each host saves to its own disk; one that loses it gets all from the others (`docs/own_disks.md`).
    Under `ParameterServerStrategy` the chief writes everything, after all earlier steps.

    SIGTERM and SIGUSR1 (which Slurm sends) on any worker make all workers save after their next common step and exit
    with code 75; a second signal ends the process at once. During validation they take effect after the next training
    step. Python delivers signals to the main thread; where `fit` runs in another thread, `request_exit` does the same.
    In Ray Train all workers save when a node is about to be lost, and train until Ray restarts them (`docs/ray.md`).

    In elastic training the workers that train save together, also while others are missing. A worker that starts later
    takes the state of another one in place of that of a checkpoint, and saves with the others when it trains with them.
    The signals, unless the program handles them itself, and `request_exit` make a single worker leave, without a save;
    if they reach all, these save first (`docs/elastic.md`). A second signal to a worker ends its process at once.

    A finished training is marked: `fit` of the same program then warns, trains nothing and returns the same History,
    unless it is asked for more epochs. A training that a callback ends by `stop_training` is finished, too. One that
    `TerminateOnNaN` ends is not: the step whose loss was not finite is not saved.

    Use one directory per training. Only one program at a time can train in it: another one waits, and raises an error
    after 100 s. For custom training loops there is `tfdist.recovery.LoopRecovery`.

    Attributes:
        saves: How many checkpoints this process has started to save.
        stall_seconds: How long they have stalled the training in total: copies, and waiting for previous writes.

    >>> import keras, numpy as np, tempfile
    >>> from tfdist.callbacks import FailureRecovery
    >>> inputs, targets = np.ones([12, 3], "float32"), np.ones([12, 1], "float32")
    >>> def train(directory, epochs):
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", loss="mse")
    ...     return model.fit(inputs, targets, epochs=epochs, verbose=0, callbacks=[FailureRecovery(directory)])
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     one, both = train(directory, epochs=1), train(directory, epochs=2)  # the second run trains one epoch
    >>> both.epoch, both.history["loss"][0] == one.history["loss"][0]
    ([0, 1], True)
    """

    restores_training = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        shared: bool = True,
        memory_every_steps: int | None = None,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        keep: int = 3,
        peer_timeout_seconds: float = 600.0,
        background: bool = True,
        replay_data: bool = False,
        handle_signals: bool = True,
    ) -> None:
        """Configures where and how often to save.

        Args:
            directory: A directory for this training only. It is created if missing. Or an address on an object store
                (`s3://bucket/run`, `gs://bucket/run`, `az://container/run`), with the extra `tfdist[remote]`.
            shared: Whether all workers share the disk of `directory`. If False, it is on a disk of each host: a host
                has the parts of its workers and copies of those of another one.
            memory_every_steps: Save to the memory of the hosts after this number of steps, beside the saves to
                `directory`. It outlives workers, not `tfdist run`, which it needs; hosts have copies of each other's.
            every_steps: Save after this number of training steps; with gradient accumulation, of micro-steps.
            every_seconds: Save when the last save was this many seconds ago.
            every_epochs: Save at the end of every so many epochs. Defaults to 1 if no interval is given.
            keep: How many checkpoints to keep at least; after a restart there may be up to `2 * keep - 1`.
            peer_timeout_seconds: How long the chief waits for the other workers' parts of a checkpoint, and they for
                the chief before training begins.
            background: Whether to write in the background. If False, a step waits until its checkpoint is on disk.
            replay_data: Whether to draw data without a position, such as a Python generator, again from its beginning
                to return to the position. If False, such data is an error.
            handle_signals: Whether to handle SIGTERM and SIGUSR1 as described above.

        Raises:
            ImportError: If the library for an address is not installed.
            ValueError: If an argument is invalid.
        """
        super().__init__()
        self._interval = SaveInterval(every_steps, every_seconds, every_epochs)
        self._tiers = StorageTiers.open(
            directory,
            shared=shared,
            memory_every_steps=memory_every_steps,
            keep=keep,
            peer_timeout_seconds=peer_timeout_seconds,
        )
        self._store = self._tiers.disk
        self._background, self._replay_data, self._handle_signals = background, replay_data, handle_signals
        self._heartbeat: Heartbeat | None = None
        self._preemption: PreemptionHandler | None = None
        self._ray_notices: RayTrainNotices | None = None
        self._exit_requested = threading.Event()
        self.saves, self.stall_seconds = 0, 0.0
        patch_epoch_iterator()
        check_strategies_early()

    def request_exit(self) -> None:
        """Makes all workers save after their next common step and exit with code 75, as SIGTERM does.

        Any thread of any worker may call this, and a signal handler. Between two calls of `fit`, it ends the next one.
        """
        self._exit_requested.set()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        rank, num_workers = rank_and_num_workers(strategy)
        warn_untested_on_tpu(strategy)
        elastic = training_strategy(strategy).elastic_coordination
        self._coordination: Coordination = elastic or WorkerCoordination(rank, num_workers)
        self._coordination.wait_for_chief(self._store.peer_timeout_seconds)
        self._iterator = training_iterator(self.model)
        timeout = self._store.peer_timeout_seconds
        self._state = state_of_fit(self.model, self.others, self._iterator.element_spec, timeout_seconds=timeout)
        if self._coordination.is_chief:
            warn_lost_callback_state(self.others)
        self._training_saves = TrainingSaves(
            self._tiers,
            self._coordination,
            self._state,
            background=self._background,
            on_end=self._iterator.on_fit_end,
        )
        drain = self._training_saves.drain
        self._iterator.on_fit_end(self._tiers.begin(self._coordination, strategy, os.environ, drain))
        # A worker that starts late calls `join`, or `train_alone`.
        checkpoint = None if self._coordination.starts_late else self._training_saves.choose()
        self._restored: Checkpoint | None = None
        self._reports_resume_cost = False
        self._was_complete = self._is_terminated_by_nan = False
        self._progress, self._logs = TrainingProgress(), None
        self._learning_rates = InitialLearningRates(optimizers_of(self.model))
        self._drawn = drawn_before_fit(seed_of_run(os.environ))
        if checkpoint is not None:
            self._resume(checkpoint, self._training_saves.restored_from)
        self._tiers.wait_until_all_have_read(self._progress.step)
        self._learning_rates.mark_trained()
        self._schedule = SaveSchedule(self._interval, self._coordination, self._progress.step)
        self._saved_progress: TrainingProgress | None = None
        self._preemption = self._ray_notices = None
        if isinstance(self._coordination, WorkerCoordination):
            self._listen(self._coordination)
        elif self._handle_signals and threading.current_thread() is not threading.main_thread():
            warn_signals_not_handled()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._progress = self._progress.in_epoch(epoch)
        checkpoint, self._restored = self._restored, None
        if checkpoint is not None and self._progress.next_step:
            # In the middle of an epoch, other callbacks and Keras have now reset metrics and moved schedules.
            self._state.restore(checkpoint, self._coordination.rank, self._coordination.num_workers, metrics=True)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._reports_resume_cost:
            self._reports_resume_cost, cost = False, self._iterator.resume_cost
            batches = "1 batch" if cost.batches == 1 else f"{cost.batches} batches"
            self._say(f"returning to the position in the data took {cost.seconds:.1f} s, for {batches}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._progress, self._logs = self._progress.after_batch(last_step(self.model, batch)), logs
        step = self._progress.step
        if self._heartbeat is not None:
            self._heartbeat.step(step)
        # Ask all on every worker: all must find the same steps.
        is_due, is_preempted = self._schedule.is_due(step), self._is_preempted(step)
        is_due |= self._ray_notices is not None and self._ray_notices.is_due(step)
        self._is_terminated_by_nan = is_terminated_by_nan(self.model, self.others, logs)
        if self._is_terminated_by_nan or self.model.stop_training:  # training would resume from a checkpoint saved now
            return
        is_due_in_memory = self._tiers.is_due(step)
        if is_due or is_preempted:
            self._save()
        elif is_due_in_memory:
            self._save(to_memory=True)
        if is_preempted:
            self._exit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._progress, self._logs = self._progress.after_epoch(), None
        is_due, is_preempted = self._schedule.is_due_after_epoch(epoch), self._is_preempted(self._progress.step)
        is_last = self.model.stop_training or epoch + 1 >= self._epochs
        if (is_due or is_preempted) and not is_last:  # after the last epoch `on_train_end` saves
            self._save()
        if is_preempted and not is_last:
            self._exit()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.phase("validation")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Batch 0 may take long because it is traced. `on_test_batch_end` would make Keras wait for each batch.
        if self._heartbeat is not None and batch > 0:
            self._heartbeat.batch(batch)

    def on_test_end(self, logs: Any = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.phase("end of validation")  # includes other callbacks

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_terminated_by_nan and self.model.stop_training:  # another callback may have unset stop_training
            self._training_saves.wait()
            if self._coordination.is_chief:
                warn_terminated_by_nan(self._progress.step, self._store.location)
        elif not self._was_complete:
            stopped = bool(self.model.stop_training)
            self._progress = replace(self._progress, stopped=stopped, requested_epochs=self._epochs)
            self._save(must_succeed=True)
            self._training_saves.wait()
            self._tiers.free_memory()
        if self._preemption is not None:
            self._preemption.close()
        if self._heartbeat is not None:
            self._heartbeat.phase("finished")
            self._heartbeat = None  # no step follows an `evaluate` with this callback

    # What an elastic training asks: see `tfdist.elastic.elastic_fit.Recovery`.

    @property
    def progress(self) -> TrainingProgress:
        """How far the training is."""
        return self._progress

    @property
    def handled_signals(self) -> Sequence[int]:
        """The signals that make a worker exit."""
        return (signal.SIGTERM, signal.SIGUSR1) if self._handle_signals else ()

    @property
    def is_asked_to_exit(self) -> bool:
        """Whether `request_exit` was called."""
        return self._exit_requested.is_set()

    def report_saves(self, report: Callable[[int, int], None]) -> None:
        """Calls `report` with the number and the step of each checkpoint that this worker has committed."""
        self._training_saves.report = report

    def state_to_join(self) -> dict[str, Any]:
        """Returns, as JSON, what a worker that joins needs to save with the others."""
        return {
            "attempt": self._training_saves.attempt,
            "first_sequence": self._training_saves.first_sequence,
            "schedule": self._schedule.state(),
            "learning_rates": self._learning_rates.values,
            "drawn": self._drawn,
        }

    def join(self, progress: TrainingProgress, state: dict[str, Any]) -> None:
        """This worker has the state of another one, with its `progress` and its `state_to_join`."""
        self._progress = progress
        self._training_saves.join(state["attempt"], state["first_sequence"])
        self._schedule.resume(state["schedule"])
        self._learning_rates.values, self._drawn = state["learning_rates"], state["drawn"]

    def train_alone(self) -> None:
        """The others are in a later `fit`: a completed training is restored, otherwise this worker trains by itself.

        It saves nothing.
        """
        checkpoint, _ = self._store.newest()
        if checkpoint is not None and TrainingProgress(**checkpoint.metadata["progress"]).is_complete(self._epochs):
            self._resume(checkpoint)

    def save_to_leave(self) -> None:
        """Saves after the last step and waits until it is written. All workers call this, and leave."""
        if self._saved_progress != self._progress:
            self._save(is_last=True)
        self._training_saves.wait()
        self._training_saves.say_preempted(self._progress, self._progress.step, self._say)

    def finish_saves(self) -> None:
        """Waits for what is being written, and logs its error."""
        self._training_saves.drain()

    @property
    def _epochs(self) -> int:
        return int(self.params.get("epochs", 0))

    def _listen(self, coordination: WorkerCoordination) -> None:
        """Handles signals and requests to exit, on all workers alike, and reports progress."""
        fit, step = running_fit(self.model), self._progress.step
        preemption = self._preemption = PreemptionHandler(
            coordination, lambda frame: fit is not None and fit.is_caller_of(frame), self._exit_requested
        )
        preemption.listen()
        self._ray_notices = RayTrainNotices.of_this_worker(coordination.rank, coordination.num_workers, step)
        if self._handle_signals:
            self._iterator.on_fit_end(preemption.uninstall)
            if not preemption.install() and not self._ray_notices.are_given:
                warn_signals_not_handled()
        self._heartbeat = Heartbeat.of_training(step)
        self._training_saves.report = None if self._heartbeat is None else self._heartbeat.saved

    def _is_preempted(self, step: int) -> bool:
        return self._preemption is not None and self._preemption.is_due(step)

    def _resume(self, checkpoint: Checkpoint, source: str = "") -> None:
        if (training := training_of(self.model)) is not None:
            training.abandon()
        rank, num_workers = self._coordination.rank, self._coordination.num_workers
        progress, epochs = TrainingProgress(**checkpoint.metadata["progress"]), self._epochs
        self._was_complete = progress.is_complete(epochs)
        # A worker of which nothing is saved resumes at the position of the first one.
        saved = checkpoint.saved_ranks
        metadata = checkpoint.read_rank(rank if rank in saved else saved[0]).metadata
        position = Position.from_json(metadata["position"])
        if self._was_complete:
            self._iterator.pass_over(position)
            start_at_epoch(self.model, epochs)
            if self._coordination.is_chief:
                warn_training_complete(progress, epochs, self._store.location)
        else:
            progress = replace(progress, stopped=False, requested_epochs=None)
            same_workers = checkpoint.num_ranks == num_workers
            self._iterator.resume_at(position, replay=self._replay_data, same_workers=same_workers)
            self._reports_resume_cost = True
            start_at_epoch(self.model, progress.epoch)
            self._say(f"resuming in epoch {progress.epoch + 1} of {epochs}, after step {progress.step}{source}")
        if any(isinstance(callback, GradientAccumulation) for callback in self.others):
            self._state.adopt_accumulation_steps(checkpoint)  # that callback does so only when the epoch begins
        self._state.restore(checkpoint, rank, num_workers, metrics=self._was_complete)
        self._progress, self._restored = progress, checkpoint
        warns = self._coordination.is_chief and not self._was_complete
        if warns:
            warn_other_seed(checkpoint.metadata.get("drawn"), self._drawn)
        self._learning_rates.compare_with_restored(checkpoint.metadata.get("learning_rates"), self.others, warn=warns)

    def _save(self, *, to_memory: bool = False, is_last: bool = False, must_succeed: bool = False) -> None:
        """Takes a snapshot and starts to write it, as `TrainingSaves.save` says."""
        for callback in self.others:
            if isinstance(callback, WeightComparison):
                callback.compare()  # the weights of one worker are saved
        progress = self._progress
        metadata = {
            "progress": asdict(progress),
            "step": progress.step,
            "epoch": progress.epoch,
            "learning_rates": self._learning_rates.values,
            "drawn": self._drawn,
        }
        stalled = self._training_saves.save(
            progress,
            metadata,
            lambda: {"position": self._iterator.position(progress.next_step, self._logs).to_json()},
            model=self.model,
            to_memory=to_memory,
            is_last=is_last,
            must_succeed=must_succeed,
        )
        if not to_memory:
            self._schedule.saved()
        if stalled is not None:
            self._saved_progress = progress
            self.stall_seconds += stalled
            self.saves += 1

    def _exit(self) -> None:
        assert self._preemption is not None
        progress = self._progress
        self._training_saves.exit_preempted(self._preemption, self.others, progress, progress.step, self._say)

    def _say(self, message: str) -> None:
        if self._coordination.is_chief and self.params.get("verbose"):
            print_line(f"FailureRecovery: {message}")
