"""`LoopRecovery`: saves a custom training loop in the background and resumes it bit by bit after a failure."""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint import Checkpoint
from tfdist.cluster import seed_of_run
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.loop_passes import LoopPasses, LoopPosition
from tfdist.data_position.loop_sources import source_of_loop
from tfdist.data_position.resumable_iterator import warn_of_resharding
from tfdist.recovery.preemption import PreemptionHandler, RayTrainNotices
from tfdist.recovery.random_generators import drawn_before_fit
from tfdist.recovery.recovery_warnings import (
    InitialLearningRates,
    warn_other_seed,
    warn_saved_at_end_only,
    warn_shared_shuffle,
    warn_signals_not_handled,
)
from tfdist.recovery.save_schedule import SaveInterval, SaveSchedule
from tfdist.recovery.storage_tiers import StorageTiers
from tfdist.recovery.trained_objects import ObjectStates, TrainedObjects, flat_objects
from tfdist.recovery.training_saves import TrainingSaves, print_line
from tfdist.recovery.training_state import TrainingState
from tfdist.recovery.worker_coordination import WorkerCoordination
from tfdist.tensorflow_internals.input_pipeline import share_a_shuffle
from tfdist.tensorflow_internals.placed_strategy import placed_devices
from tfdist.training.strategy_kinds import describe_strategy, is_of_parameter_servers, rank_and_num_workers
from tfdist.training.strategy_protocol import training_strategy

_drawn_by_loops: weakref.WeakSet[Any] = weakref.WeakSet()


class LoopRecovery:
    """Saves checkpoints of a custom training loop; the same program started again resumes from the newest one.

    A loop that is killed at any moment and started again ends with the same values, bit by bit, as one that was not
    interrupted. Saved are all objects that it is given, the position in the data, and the global random generators of
    Python, NumPy, Keras and TensorFlow. `with` restores them. `epochs` and `steps` continue at the saved position;
    before the first batch they restore once more, so that code of the loop which precedes it, such as the reset of a
    metric, counts once.

    A step is complete when the loop asks for the next batch, or leaves the pass by `break`. At the end of `with` the
    loop is saved; a program that has finished trains nothing when it is started again, unless it asks for more epochs.
    If an exception ends `with`, nothing is saved after the last complete step.

    Everything else is as with `FailureRecovery`: checkpoints are copied and written in the background, on all workers
    after the same step, to a directory that they share or to an object store. SIGTERM and SIGUSR1 on any worker make
    all workers save after their next common step and exit with code 75. Use one directory per training.

    Under `MultiWorkerMirroredStrategy` all workers run the same loop, and each saves what it has for itself: variables
    that do not belong to a strategy, objects with methods, metrics, residuals of compression, its position.
    `docs/recovery.md` says what works with which strategy.

    Attributes:
        restored: Whether the loop continues from a checkpoint.
        step: How many steps are complete, over all epochs.
        epoch: The present epoch, from 0.
        saves: How many checkpoints this process has started to save.
        stall_seconds: How long they have stalled the training in total.

    >>> import keras, tempfile
    >>> import tensorflow as tf
    >>> from tfdist.recovery import LoopRecovery
    >>> def train(directory, epochs):
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    ...     optimizer, mean = keras.optimizers.Adam(), keras.metrics.Mean()
    ...     dataset = tf.data.Dataset.from_tensor_slices(tf.ones([6, 1])).shuffle(6).batch(2)
    ...     given = {"model": model, "optimizer": optimizer, "state": {"mean": mean}}
    ...     with LoopRecovery(directory, **given, verbose=False) as recovery:
    ...         for epoch in recovery.epochs(epochs):
    ...             mean.reset_state()
    ...             for step, batch in recovery.steps(dataset):
    ...                 with tf.GradientTape() as tape:
    ...                     loss = tf.reduce_mean((model(batch) - 2 * batch) ** 2)
    ...                 optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    ...                 mean.update_state(loss)
    ...     return recovery.restored, recovery.step, float(mean.result())
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     first, both = train(directory, epochs=1), train(directory, epochs=2)  # the second run trains one epoch
    >>> first[:2], both[:2], both[2] < first[2]
    ((False, 3), (True, 6), True)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        state: Mapping[str, Any] | None = None,
        strategy: Any = None,
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
        verbose: bool = True,
    ) -> None:
        """Configures what, where and how often to save.

        Args:
            directory: A directory for this training only. It is created if missing. Or an address on an object store
                (`s3://bucket/run`, `gs://bucket/run`, `az://container/run`), with the extra `tfdist[remote]`.
            model: A model, or a list or dict of models. They are built. Optimizers and metrics of compiled models
                belong to them.
            optimizer: An optimizer, or a list or dict of optimizers.
            state: Further models, layers, optimizers, metrics, variables, random generators, objects with `state_dict`
                and `load_state_dict` or `get_state` and `set_state`, in lists, tuples and dicts of any depth. The
                methods return and take None, bool, int, float, str, arrays, and lists, tuples and dicts of these.
            strategy: The strategy of the variables. By default that of the models, else the one in whose scope this is
                called.
            shared: Whether all workers share the disk of `directory`; if not, see `FailureRecovery`.
            memory_every_steps: Save to the memory of the hosts after this number of steps, too; see `FailureRecovery`.
            every_steps: Save after this number of steps.
            every_seconds: Save when the last save was this many seconds ago.
            every_epochs: Save at the end of every so many `epochs`. Defaults to 1 if no interval is given; a warning
                says so where the loop has none.
            keep: How many checkpoints to keep at least; after a restart there may be up to `2 * keep - 1`.
            peer_timeout_seconds: How long the chief waits for the other workers' parts of a checkpoint, and they for
                the chief before training begins.
            background: Whether to write in the background. If False, a step waits until its checkpoint is on disk.
            replay_data: Whether to draw data without a position, such as a Python generator, again from its beginning
                to return to the position. If False, such data is an error.
            handle_signals: Whether to handle SIGTERM and SIGUSR1 as described above.
            verbose: Whether the chief prints from where it resumes, and that it was preempted.

        Raises:
            ImportError: If the library for an address is not installed.
            ValueError: If an argument is invalid.
        """
        given = {"model": model, "optimizer": optimizer, "state": state}
        self._objects = {name: one for name, one in given.items() if one is not None}
        self._strategy = strategy
        self._interval = SaveInterval(every_steps, every_seconds, every_epochs)
        self._tiers = StorageTiers.open(
            directory,
            shared=shared,
            memory_every_steps=memory_every_steps,
            keep=keep,
            peer_timeout_seconds=peer_timeout_seconds,
        )
        self._background, self._replay_data, self._handle_signals = background, replay_data, handle_signals
        self._verbose = verbose
        self._exit_requested = threading.Event()
        self.restored, self.saves, self.stall_seconds = False, 0, 0.0
        self._passes = LoopPasses(self._source_of)
        self._drawn_from: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_entered = self._is_in_step = self._is_save_asked = False

    @property
    def step(self) -> int:
        return self._passes.steps - self._is_in_step

    @property
    def epoch(self) -> int:
        return self._passes.epoch

    def request_exit(self) -> None:
        """Makes all workers save after their next common step and exit with code 75, as SIGTERM does.

        Any thread of any worker may call this, and a signal handler.
        """
        self._exit_requested.set()

    def __enter__(self) -> "LoopRecovery":
        """Restores the newest complete checkpoint, if there is one. All workers call this.

        Raises:
            CheckpointError: None of the checkpoints is complete, or another process trains in the directory.
            ValueError: An object cannot be saved, or the objects are not those of the checkpoint.
        """
        with contextlib.ExitStack() as cleanup:
            self._begin(cleanup)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Saves the loop, waits until that is written, and releases the directory; after an exception only the last."""
        self._is_entered = False
        with self._cleanup:
            if kind is None:
                self._finish()

    def epochs(self, number: int) -> Iterator[int]:
        """Yields the numbers of epochs from 0 to `number - 1`; of a loop that resumes, from that of the checkpoint.

        Raises:
            RuntimeError: Outside of `with`.
        """
        self._check_entered("epochs")
        self._has_epochs = True
        return self._epochs(number)

    def steps(self, dataset: Any, limit: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yields the number of each step, from 0 over all epochs, and its batch, of one pass over data.

        A loop that resumes gets the rest of the pass of the checkpoint; earlier passes of its epoch yield nothing. An
        epoch may have several passes, one after another. Validation needs none: draw its data directly.

        Args:
            dataset: A `tf.data.Dataset`, plain or distributed by the strategy; a dataset or a loader of Grain, or
                torchdata's `StatefulDataLoader`, whose batches come as tensors, divided among the replicas; another
                iterable that saves its own position by `state_dict` and `load_state_dict` or `get_state` and
                `set_state`; or a sequence, such as `range(1000)` for a loop that draws its batches itself. Created
                before the loop.
            limit: After how many batches the pass ends, if not with the data.

        Raises:
            RuntimeError: Outside of `with`, or within another pass.
            ValueError: The data has no position, or is not that of the checkpoint.
            CheckpointError: An earlier checkpoint could not be written.
        """
        self._check_entered("steps")
        return self._steps(dataset, limit)

    def save(self) -> None:
        """Asks for a checkpoint: after the present step, or after the present epoch if its passes have ended.

        All workers call this in the same step.

        Raises:
            RuntimeError: Outside of `with`.
        """
        self._check_entered("save")
        self._is_save_asked = True

    def _begin(self, cleanup: contextlib.ExitStack) -> None:
        strategy = self._strategy = self._found_strategy()
        rank, num_workers = rank_and_num_workers(strategy, "LoopRecovery")
        _check_strategy(strategy)
        self._trained = TrainedObjects(self._objects, strategy)
        timeout = self._tiers.disk.peer_timeout_seconds
        states = ObjectStates(self._trained.with_state)
        self._state = TrainingState(self._trained, states, timeout_seconds=timeout)
        coordination = self._coordination = WorkerCoordination(rank, num_workers)
        coordination.wait_for_chief(timeout)
        self._training_saves = TrainingSaves(
            self._tiers,
            coordination,
            self._state,
            background=self._background,
            on_end=cleanup.callback,
            of_loop=True,
        )
        cleanup.callback(self._tiers.begin(coordination, strategy, os.environ, self._training_saves.drain))
        self._passes, self._is_save_asked, self._is_in_step = LoopPasses(self._source_of), False, False
        self._has_epochs = False
        self._learning_rates = InitialLearningRates(self._trained.optimizers())
        self._drawn = drawn_before_fit(seed_of_run(os.environ))
        checkpoint = self._training_saves.choose()
        self.restored, self._saved, self._same_workers = checkpoint is not None, self._progress(), True
        if checkpoint is not None:
            self._resume(checkpoint)
        self._learning_rates.mark_trained()
        step = self._passes.steps
        self._tiers.wait_until_all_have_read(step)
        self._schedule = SaveSchedule(self._interval, coordination, step)
        self._preemption = PreemptionHandler(coordination, requested=self._exit_requested)
        self._preemption.listen()
        self._ray_notices = RayTrainNotices.of_this_worker(rank, num_workers, step)
        if self._handle_signals:
            cleanup.callback(self._preemption.uninstall)
            if not self._preemption.install() and not self._ray_notices.are_given:
                warn_signals_not_handled("LoopRecovery", "the loop")
        self._heartbeat = Heartbeat.of_training(step)
        self._training_saves.report = None if self._heartbeat is None else self._heartbeat.saved
        self._is_entered = True

    def _resume(self, checkpoint: Checkpoint) -> None:
        rank, num_workers = self._coordination.rank, self._coordination.num_workers
        saved = checkpoint.saved_ranks
        # A worker of which nothing is saved resumes at the position of the first one.
        metadata = checkpoint.read_rank(rank if rank in saved else saved[0]).metadata
        position = LoopPosition.from_json(metadata["position"])
        self._same_workers = checkpoint.num_ranks == num_workers

        def restore() -> None:
            self._state.restore(checkpoint, rank, num_workers, metrics=True)

        restore()
        self._passes.resume_at(position, restore, same_workers=self._same_workers)
        self._saved = position.steps, position.epoch, int(position.dataset is not None)
        if self._coordination.is_chief:
            warn_other_seed(checkpoint.metadata.get("drawn"), self._drawn, "the loop")
        self._learning_rates.compare_with_restored(
            checkpoint.metadata.get("learning_rates"),
            (),
            warn=self._coordination.is_chief,
            change="assign it in the loop",
        )
        self._say(
            f"resuming in epoch {position.epoch + 1}, after step {position.steps}{self._training_saves.restored_from}"
        )

    def _finish(self) -> None:
        if self._passes.is_resuming:  # a finished loop without `epochs`, which has run its code around the pass again
            self._passes.restore()
        elif self._is_save_asked or self._saved != self._progress():
            self._save(must_succeed=True)
        self._training_saves.wait()
        self._tiers.free_memory()
        self._preemption.close()
        if self._heartbeat is not None:
            self._heartbeat.phase("finished")

    def _epochs(self, number: int) -> Iterator[int]:
        is_first = True
        for epoch in self._passes.epochs(number):
            if not is_first:
                self._save_if_due(self._schedule.is_due_after_epoch(epoch - 1))
            is_first = False
            yield epoch

    def _steps(self, dataset: Any, limit: int | None) -> Iterator[tuple[int, Any]]:
        if self._passes.is_in_pass:
            raise RuntimeError(
                "A loop has one position in its data. Received: a call of `steps` within another pass. Expected: one "
                "pass after another. Draw from data within a pass, such as validation data, directly; join datasets "
                "that are drawn together by `tf.data.Dataset.zip`."
            )
        if not self._has_epochs and self._interval.steps is None and self._interval.seconds is None:
            warn_saved_at_end_only()
        try:
            for batch in self._passes.batches(dataset, limit):
                self._is_in_step = True
                yield self._passes.steps - 1, batch
                self._is_in_step = False
                self._after_step()
        finally:
            self._is_in_step = False
        if self._heartbeat is not None:
            self._heartbeat.phase("between two passes")

    def _after_step(self) -> None:
        step = self._passes.steps
        if self._heartbeat is not None:
            self._heartbeat.step(step)
        # Ask all on every worker: all must find the same steps.
        is_due, is_due_in_memory = self._schedule.is_due(step), self._tiers.is_due(step)
        self._save_if_due(self._ray_notices.is_due(step) or is_due, is_due_in_memory)

    def _save_if_due(self, is_due: bool, is_due_in_memory: bool = False) -> None:
        is_preempted = self._preemption.is_due(self._passes.steps)
        if is_due or is_preempted or self._is_save_asked:
            self._save()
        elif is_due_in_memory:
            self._save(to_memory=True)
        if is_preempted:
            step = self._passes.steps
            self._training_saves.exit_preempted(self._preemption, (), self._progress(), step, self._say)

    def _save(self, *, to_memory: bool = False, must_succeed: bool = False) -> None:
        progress, epoch = self._progress(), self._passes.epoch
        metadata = {
            "step": self._passes.steps,
            "epoch": epoch,
            "learning_rates": self._learning_rates.values,
            "drawn": self._drawn,
        }
        stalled = self._training_saves.save(
            progress,
            metadata,
            lambda: {"position": self._passes.position().to_json()},
            to_memory=to_memory,
            must_succeed=must_succeed,
        )
        if not to_memory:
            self._schedule.saved()
            self._saved, self._is_save_asked = progress, False
        self.saves, self.stall_seconds = self.saves + 1, self.stall_seconds + (stalled or 0.0)

    def _progress(self) -> tuple[int, ...]:
        """Returns what differs between any two places at which the loop saves."""
        return self._passes.steps, self._passes.epoch, int(self._passes.is_in_pass)

    def _source_of(self, dataset: Any) -> DatasetSource:
        if isinstance(dataset, tf.data.Dataset):
            if any(share_a_shuffle(earlier, dataset) for earlier in _drawn_by_loops - self._drawn_from):
                warn_shared_shuffle()
            _drawn_by_loops.add(dataset)
            self._drawn_from.add(dataset)
        source = source_of_loop(dataset, self._strategy, replay=self._replay_data)
        if not self._same_workers and source.is_per_worker():
            warn_of_resharding()
        return source

    def _found_strategy(self) -> Any:
        if self._strategy is not None:
            return self._strategy
        models = (one for _, one in flat_objects(self._objects) if isinstance(one, keras.Model))
        return next((one.distribute_strategy for one in models), tf.distribute.get_strategy())

    def _check_entered(self, name: str) -> None:
        if not self._is_entered:
            raise RuntimeError(
                f"LoopRecovery works within a `with` statement. Received: a call of `{name}` outside of it. Expected: "
                "`with LoopRecovery(…) as recovery:` around the loop."
            )

    def _say(self, message: str) -> None:
        if self._coordination.is_chief and self._verbose:
            print_line(f"LoopRecovery: {message}")


def _check_strategy(strategy: Any) -> None:
    """Refuses strategies under which a loop cannot be saved.

    Raises:
        ValueError: It is one.
    """
    ours, reason, remedy = training_strategy(strategy), "", ""
    if is_of_parameter_servers(strategy):
        reason, remedy = (
            "whose workers may compute steps at any time",
            "`fit`",
        )
    elif placed_devices(strategy):
        reason, remedy = "whose stages only steps of Keras use", "`fit`"
    elif ours.local_updates is not None:
        reason, remedy = "whose workers train by themselves, by samples that only `fit` counts", "`fit`"
    elif ours.may_lose_workers:
        reason, remedy = "with `elastic`, whose workers join and leave", "an `ElasticLoop`"
    if reason:
        raise ValueError(
            f"LoopRecovery cannot save a loop under this strategy. Received: {describe_strategy(strategy)}, {reason}. "
            f"Expected: `MirroredStrategy`, `MultiWorkerMirroredStrategy`, or none. Train by {remedy} instead."
        )
