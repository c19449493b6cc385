"""Training that goes on after a kill as if nothing had happened."""

import logging
import os
import secrets
import sys
import time
from dataclasses import asdict
from typing import Any

from tfdist.callbacks.gradient_accumulation import GradientAccumulation
from tfdist.callbacks.other_strategies import check_early, place_of, tell_of_tpus
from tfdist.checkpoint import Checkpoint, CheckpointStore, DirectoryLock
from tfdist.cluster.exit_codes import PREEMPTED_EXIT_CODE
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.keras_internals.callback_list import LastCallback
from tfdist.keras_internals.running_fit import running_fit
from tfdist.keras_internals.scheduled_training import training_of
from tfdist.recovery.agreement import Agreement
from tfdist.recovery.choice import choose, open_chosen
from tfdist.recovery.completeness import tell_of_completeness
from tfdist.recovery.divergence import is_ended_by_nan, tell_of_nan
from tfdist.recovery.learning_rates import BeginningRates
from tfdist.recovery.leaving import leave
from tfdist.recovery.position import Position, install_resumable_iterator, start_at_epoch, training_iterator
from tfdist.recovery.preemption import Preemption
from tfdist.recovery.progress import Progress
from tfdist.recovery.schedule import Interval, Schedule
from tfdist.recovery.training_state import TrainingState
from tfdist.recovery.writing import finish, new_writer

_log = logging.getLogger("tfdist")


class FailureRecovery(LastCallback):
    """Saves checkpoints of the whole training, and goes on from the newest whole one when `fit` is called again.

    A training that was killed at any moment and started again ends with the same weights, bit by bit, as one that was
    not disturbed: weights, optimizer, accumulators, compression residuals, batch statistics, metrics of the running
    epoch, random generators, other callbacks, the History, and the position in the data come back, on every worker.
    `fit` goes on in the middle of the epoch. `docs/guarantees.md` says what is promised for each failure.

    Saves are copied and written in the background: a step waits for the save before if that is still being written,
    and where variables lie on a GPU or TPU, for their copy to host memory. An error of a write is raised by `fit` at
    the next save, or at its end. With several workers `directory` must be on a file system that they share; each writes
    its own part. Under `ParameterServerStrategy` the chief writes all, when the steps before it have ended.

    SIGTERM, and SIGUSR1 as Slurm sends it, on any worker have all of them save after their next common step and exit
    with code 75; a second signal ends the process at once. During validation they are heeded after the next training
    step.

    A finished training is marked: `fit` of the same program then warns, trains nothing and returns the same History,
    unless it is asked for more epochs. One that a callback has ended by `stop_training` is finished, too. One that
    `TerminateOnNaN` has ended is not: nothing is saved of the step whose loss was not finite.

    A directory is for one training, and for one program at a time: if another one trains there, this one waits for it,
    and ends with an error if that takes long. Loops of one's own are not recovered, only `fit`.

    Attributes:
      saves: how many checkpoints were begun in this process.
      stall_seconds: for how long they have held the training up in all: copies, and waiting for the write before.

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

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        keep: int = 3,
        peer_timeout_seconds: float = 600.0,
        background: bool = True,
        replay_data: bool = False,
        handle_signals: bool = True,
    ) -> None:
        """Describes where and how often to save.

        Args:
          directory: of this training alone; made where it is missing.
          every_steps: save after every so many training steps; with gradient accumulation these are micro-steps.
          every_seconds: save when the last save is so many seconds ago.
          every_epochs: save at the end of every so many epochs; 1 if no interval is given.
          keep: how many checkpoints to keep at least; after a restart there may be up to `2 * keep - 1`.
          peer_timeout_seconds: how long the chief waits for the other workers' parts of a checkpoint.
          background: whether to write in the background. If not, a step waits until its checkpoint is on the disk.
          replay_data: whether data that has no position, such as a Python generator, may be drawn again from its
            beginning to come to where it was. If not, such data is an error.
          handle_signals: whether SIGTERM and SIGUSR1 are handled as above.

        Raises:
          ValueError: an argument is not what is expected.
        """
        super().__init__()
        if every_steps is None and every_seconds is None and every_epochs is None:
            every_epochs = 1
        self._interval = Interval(every_steps, every_seconds, every_epochs)
        self._store = CheckpointStore(directory, keep=keep, peer_timeout_seconds=peer_timeout_seconds)
        self._background, self._replay_data, self._handle_signals = background, replay_data, handle_signals
        self._heartbeat: Heartbeat | None = None
        self.saves, self.stall_seconds = 0, 0.0
        install_resumable_iterator()
        check_early()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        rank, workers = place_of(strategy)
        tell_of_tpus(strategy)
        self._agreement = Agreement(rank, workers)
        self._writer = new_writer()
        self._iterator = training_iterator(self.model)
        self._state = TrainingState(self.model, self.others, self._iterator.element_spec)
        if rank == 0:
            self._state.warn_of_callbacks()
            self._take_directory()
        sequence, self._attempt = self._agreement.from_chief("resume", self._choose() if rank == 0 else None)
        self._restored: Checkpoint | None = None
        self._tells_cost = False
        self._was_complete = self._is_ended_by_nan = False
        self._progress, self._logs = Progress(), None
        self._rates = BeginningRates(self.model)
        if sequence is not None:
            self._resume(open_chosen(self._store, sequence, rank))
        self._rates.begun()
        self._sequence = 0 if sequence is None else sequence + 1
        self._schedule = Schedule(self._interval, self._agreement, self._progress.step)
        fit = running_fit(self.model)
        self._preemption = Preemption(self._agreement, lambda frame: fit is not None and fit.is_beneath(frame))
        if self._handle_signals:
            self._iterator.at_end_of_fit(self._preemption.stop_listening)
            if not self._preemption.listen():
                _log.warning("FailureRecovery handles no signals: `fit` does not run in the main thread.")
        self._heartbeat = Heartbeat.from_environment()
        if self._heartbeat is not None:
            self._heartbeat.start()
            self._heartbeat.ready()
            self._heartbeat.step(self._progress.step)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._progress = self._progress.in_epoch(epoch)
        checkpoint, self._restored = self._restored, None
        if checkpoint is not None and self._progress.next_step:
            # The beginning of the epoch, which this is not, has reset the metrics and moved schedules.
            self._state.restore(checkpoint, self._agreement.rank, self._agreement.workers, metrics=True)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._tells_cost:
            self._tells_cost, skipped = False, self._iterator.skipped
            batches = "1 batch" if skipped.batches == 1 else f"{skipped.batches} batches"
            self._say(f"coming back to the position in the data took {skipped.seconds:.1f} s, for {batches}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._progress, self._logs = self._progress.after_batch(batch), logs
        step = self._progress.step
        if self._heartbeat is not None:
            self._heartbeat.step(step)
        # Whether a step saves must be known to all workers, each for itself.
        is_due, is_preempted = self._schedule.is_due(step), self._preemption.is_due(self._progress.step)
        self._is_ended_by_nan = is_ended_by_nan(self.model, self.others, logs)
        if self._is_ended_by_nan or self.model.stop_training:  # a checkpoint of it would train on
            return
        if is_due or is_preempted:
            self._save()
        if is_preempted:
            self._leave()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._progress, self._logs = self._progress.after_epoch(), None
        is_due, is_preempted = self._schedule.is_due_after_epoch(epoch), self._preemption.is_due(self._progress.step)
        is_last = self.model.stop_training or epoch + 1 >= self._epochs
        if (is_due or is_preempted) and not is_last:  # else `on_train_end` saves
            self._save()
        if is_preempted and not is_last:
            self._leave()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.phase("validation")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        # The first may take long, as it is traced. Not at its end: Keras would wait for each before it begins the next.
        if self._heartbeat is not None and batch > 0:
            self._heartbeat.batch(batch)

    def on_test_end(self, logs: Any = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.phase("end of validation")  # of other callbacks, too

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_ended_by_nan and self.model.stop_training:  # not if another callback has it train on
            self._writer.wait()
            if self._agreement.rank == 0:
                tell_of_nan(self._progress.step, self._store.directory)
        elif not self._was_complete:
            stopped = bool(self.model.stop_training)
            self._progress = self._progress.finished(stopped=stopped, asked_epochs=self._epochs)
            self._save()
            self._writer.wait()
        self._preemption.close()
        if self._heartbeat is not None:
            self._heartbeat.phase("finished")
            self._heartbeat = None  # `evaluate` with this callback is followed by no step

    def _take_directory(self) -> None:
        writer, lock = self._writer, DirectoryLock(self._store.directory)  # of this `fit`: one before may end later
        lock.acquire()

        def give_up() -> None:
            finish(writer)
            lock.release()

        self._iterator.at_end_of_fit(give_up)

    def _choose(self) -> tuple[int | None, str]:
        """Called on the chief: the checkpoint to go on from, and a name of this attempt."""
        checkpoint = choose(self._store)
        return (None if checkpoint is None else checkpoint.sequence), secrets.token_hex(8)

    @property
    def _epochs(self) -> int:
        return int(self.params.get("epochs", 0))

    def _resume(self, checkpoint: Checkpoint) -> None:
        if (training := training_of(self.model)) is not None:
            training.abandon()
        progress, rank = Progress(**checkpoint.facts["progress"]), self._agreement.rank
        epochs = self._epochs
        self._was_complete = progress.is_complete(epochs)
        if self._was_complete:
            start_at_epoch(self.model, epochs)
            if rank == 0:
                tell_of_completeness(progress, epochs, self._store.directory)
        else:
            progress = progress.going_on()
            # Each worker's own, where there are as many as before; the steps are common to all.
            at = checkpoint.of_rank(rank if rank < checkpoint.world else 0).notes["position"]
            same_workers = checkpoint.world == self._agreement.workers
            self._iterator.resume_at(Position.from_json(at), replay=self._replay_data, same_workers=same_workers)
            self._tells_cost = True
            start_at_epoch(self.model, progress.epoch)
            self._say(f"going on in epoch {progress.epoch + 1} of {epochs}, after step {progress.step}")
        if any(isinstance(other, GradientAccumulation) for other in self.others):
            self._state.accumulate_as_in(checkpoint)  # else that callback would only do so when the epoch begins
        self._state.restore(checkpoint, rank, self._agreement.workers, metrics=self._was_complete)
        self._progress, self._restored = progress, checkpoint
        tells = rank == 0 and not self._was_complete
        self._rates.go_on(checkpoint.facts.get("learning_rates"), self.others, tells=tells)

    def _save(self) -> None:
        sequence, rank, workers = self._sequence, self._agreement.rank, self._agreement.workers
        facts = {
            "progress": asdict(self._progress),
            **{name: getattr(self._progress, name) for name in ("step", "epoch")},
            "learning_rates": self._rates.values,
        }
        if (training := training_of(self.model)) is not None:
            training.wait()  # for steps that workers of parameter servers are still at
        began = time.perf_counter()
        position = self._iterator.position(self._progress.next_step, self._logs)
        self._writer.wait()  # it writes what the next snapshot writes over
        shared, own = self._state.snapshot({"position": position.to_json()}, is_chief=rank == 0)
        self._sequence += 1

        def write() -> None:
            self._state.finish_snapshot()
            self._store.save(sequence, self._attempt, rank=rank, world=workers, own=own, shared=shared, facts=facts)
            if self._heartbeat is not None and rank == 0:  # the chief's write is over when all are
                self._heartbeat.saved(sequence, facts["step"])

        self._writer.submit(write)
        if not self._background:
            self._writer.wait()
        self._schedule.saved()
        self.saves, self.stall_seconds = self.saves + 1, self.stall_seconds + time.perf_counter() - began

    def _leave(self) -> None:
        self._writer.wait()
        self._agreement.meet("saved")  # nobody ends before the chief has committed
        self._say(f"preempted: saved after step {self._progress.step}; exit code {PREEMPTED_EXIT_CODE}")
        self._preemption.leave()
        leave(PREEMPTED_EXIT_CODE, self.others, is_alone=self._agreement.workers == 1)

    def _say(self, message: str) -> None:
        if self._agreement.rank == 0 and self.params.get("verbose"):
            sys.stdout.write(f"FailureRecovery: {message}\n")
            sys.stdout.flush()
