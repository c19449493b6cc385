"""The state of a training besides the data position: its counts of steps and epochs, and the shards of a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import keras
import numpy as np

from tfdist.checkpoint import Checkpoint, Shard, TrainingStore, WorkerFiles
from tfdist.checkpoint.errors import no_worker_files
from tfdist.recovery.callback_state import (
    PYTHON_TENSORS,
    CallbackStates,
    check_callbacks,
    reject_backup_and_restore,
    restore_callbacks,
    save_callbacks,
)
from tfdist.recovery.missing_ranks import shard_of_missing_rank
from tfdist.recovery.random_generators import (
    check_python_and_numpy,
    python_and_numpy_state,
    restore_python_and_numpy,
)
from tfdist.recovery.resharding import is_replica_name, merge_ranks
from tfdist.recovery.trained_model import Trained, TrainedModel
from tfdist.recovery.variable_copies import HostCopies, HostViews, WorkerCopies
from tfdist.recovery.variable_names import NamedVariables
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.recovery.worker_calls import check_shared_directory, own_task, task_of
from tfdist.recovery.worker_tensors import open_worker_tensors
from tfdist.tensorflow_internals.placed_strategy import placed_devices
from tfdist.training.strategy_protocol import training_strategy

_ON_WORKERS = "on_workers"
_ROW_SHARES = "row_shares"


@dataclass(frozen=True)
class TrainingProgress:
    """Counts of a training, equal on all workers.

    >>> progress = TrainingProgress().after_batch(0).after_batch(1)
    >>> progress.step, progress.next_step, progress.after_epoch()
    (2, 2, TrainingProgress(step=2, epoch=1, next_step=0, stopped=False, requested_epochs=None))
    >>> progress.after_batch(5).step, progress.after_epoch().after_batch(1).step  # four and two steps per execution
    (6, 4)
    >>> stopped = replace(progress.after_epoch(), stopped=True, requested_epochs=5)
    >>> stopped.is_complete(5), stopped.is_complete(6)
    (True, False)
    """

    # training steps since the training began, over all epochs and restarts; with accumulation, micro-steps
    step: int = 0
    epoch: int = 0  # the current epoch, or the next one between two epochs, from 0
    next_step: int = 0  # the next step of that epoch, from 0
    stopped: bool = False  # whether a callback has ended the training before its last epoch
    # how many epochs `fit` was asked for when the training ended; None before its end
    requested_epochs: int | None = None

    def in_epoch(self, epoch: int) -> "TrainingProgress":
        """Returns the progress when `epoch` begins or resumes."""
        return self if epoch == self.epoch else replace(self, epoch=epoch, next_step=0)

    def after_batch(self, batch: int) -> "TrainingProgress":
        """Returns the progress after batch `batch` of the epoch; with several steps per execution, the last of them."""
        return replace(self, step=self.step + batch + 1 - self.next_step, next_step=batch + 1)

    def after_epoch(self) -> "TrainingProgress":
        """Returns the progress at the end of the epoch."""
        return replace(self, epoch=self.epoch + 1, next_step=0)

    def is_complete(self, epochs: int) -> bool:
        """Returns whether nothing remains to train of `epochs` epochs."""
        was_stopped = self.stopped and (self.requested_epochs is None or epochs <= self.requested_epochs)
        return was_stopped or self.epoch >= epochs


class SavedTraining(Protocol):
    """What is restored: a `Checkpoint`, or the state that another worker has sent."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the training."""
        ...

    @property
    def saved_ranks(self) -> Sequence[int]:
        """The ranks whose state it has."""
        ...

    def read_shared(self) -> Shard:
        """Returns what is equal on all ranks."""
        ...

    def read_rank(self, rank: int) -> Shard:
        """Returns what differs between ranks."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """The state of a training between two steps, for a checkpoint."""

    shared: Shard | None  # None on other ranks than the chief
    rank: Shard  # of this rank
    worker_files: WorkerFiles | None  # what workers write; None: all variables are on this process
    # fills the arrays of the shards, in any thread. Until then steps need memory for what they change.
    finish: Callable[[], None]


class PythonState(Protocol):
    """What else a training saves: the state of callbacks, or of objects that a custom loop names."""

    def save(self) -> CallbackStates:
        """Returns the present states."""
        ...

    def check(self, values: dict[str, Any], *, all_present: bool) -> None:
        """Raises a `ValueError` if the objects are not those of the checkpoint. Changes nothing."""
        ...

    def restore(self, values: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        """Restores what `save` has returned."""
        ...


class _Callbacks:
    """The callbacks of a `fit`."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        reject_backup_and_restore(callbacks)
        self._callbacks = callbacks

    def save(self) -> CallbackStates:
        return save_callbacks(self._callbacks)

    def check(self, values: dict[str, Any], *, all_present: bool) -> None:
        check_callbacks(self._callbacks, values, all_present=all_present)

    def restore(self, values: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        restore_callbacks(self._callbacks, values, tensors)


def state_of_fit(
    model: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    element_spec: Any,
    *,
    timeout_seconds: float,
    copies: HostViews | None = None,
) -> "TrainingState":
    """Returns the state of a `fit` of `model`. `callbacks` are those of `fit` without FailureRecovery.

    See `TrainingState`.

    Raises:
        ValueError: If a callback would restore the training, too.
        RuntimeError: If the shapes of a batch are not known.
    """
    trained, python = TrainedModel(model), _Callbacks(callbacks)
    return TrainingState(trained, python, element_spec, timeout_seconds=timeout_seconds, copies=copies)


class TrainingState:
    """The variables of a training, its callbacks or other objects, and the random generators of this process."""

    def __init__(
        self,
        trained: Trained,
        python: PythonState,
        element_spec: Any = None,
        *,
        timeout_seconds: float,
        copies: HostViews | None = None,
    ) -> None:
        """Creates the variables that Keras would create in the first step, see `VariableSnapshots.build`.

        `timeout_seconds` is how long to wait for workers that write or read variables on their devices. With `copies`
        snapshots of variables on this process share their memory.

        Raises:
            RuntimeError: If the shapes of a batch are not known.
        """
        self._trained, self._python, self._strategy = trained, python, trained.strategy
        self._num_replicas = int(self._strategy.num_replicas_in_sync)
        self._timeout_seconds = timeout_seconds
        is_placed = bool(placed_devices(self._strategy))
        self._copies = WorkerCopies(timeout_seconds) if is_placed else copies or HostCopies()
        self._variables = VariableSnapshots(trained, self._copies)
        self._variables.build(element_spec)

    def check_workers_see(self, store: TrainingStore) -> None:
        """Checks that the workers whose devices hold variables see the directory of the checkpoints.

        Raises:
            CheckpointError: If one does not, or does not answer.
            ValueError: If there is no directory, and devices hold variables.
        """
        devices = placed_devices(self._strategy)
        directory = store.directory
        if directory is None:
            if devices:
                raise no_worker_files(store.location)
            return
        tasks = {task: device for device in devices if (task := task_of(device)) != own_task()}
        if tasks:
            check_shared_directory(directory, tasks, self._timeout_seconds)

    def wait_for_steps(self) -> None:
        """Waits for the steps that workers of parameter servers still compute."""
        self._trained.wait()

    def snapshot(self, metadata: dict[str, Any], *, is_chief: bool) -> "Snapshot":
        """Returns the present state, with `metadata` as JSON in the shard of this rank. The next one overwrites it."""
        python = self._python.save()
        rank_metadata = {**metadata, "generators": python_and_numpy_state(), "callbacks": python.values}
        if not is_chief:
            NamedVariables(self._trained).send_split_slots()
            rank_shard = Shard({**self._variables.per_replica(), **python.own_tensors}, rank_metadata)
            return Snapshot(None, rank_shard, None, self._copies.finish)
        shared, per_replica, description = self._variables.snapshot()
        shared_metadata = {"description": description}
        if (shares := training_strategy(self._strategy).row_shares) is not None:
            shared_metadata[_ROW_SHARES] = shares.saved()
        worker_files = self._copies.copy_on_workers() if isinstance(self._copies, WorkerCopies) else None
        if worker_files is not None:
            shared_metadata[_ON_WORKERS] = worker_files.description
        shared_shard = Shard({**shared, **python.tensors}, shared_metadata)
        rank_shard = Shard({**per_replica, **python.own_tensors}, rank_metadata)
        return Snapshot(shared_shard, rank_shard, worker_files, self._copies.finish)

    def adopt_accumulation_steps(self, checkpoint: SavedTraining) -> None:
        """Sets the number of micro-steps per update to that of the checkpoint."""
        accumulation = self._trained.accumulation()
        saved_steps = checkpoint.read_shared().metadata["description"]["accumulation_steps"]
        if accumulation is not None and accumulation.steps != saved_steps:
            accumulation.change(saved_steps)

    def restore(self, checkpoint: SavedTraining, rank: int, num_workers: int, *, metrics: bool) -> None:
        """Restores a checkpoint, also one that another number of ranks or replicas saved.

        The metrics are restored for an epoch that resumes.

        Raises:
            ValueError: If the checkpoint does not match this program; nothing is changed in that case.
        """
        shared = checkpoint.read_shared()
        description = shared.metadata["description"]
        same_workers = checkpoint.num_ranks == num_workers and description["replicas"] == self._num_replicas
        rank_shard = self._read_rank(checkpoint, rank if same_workers else 0)
        per_replica = _of_variables(rank_shard) if same_workers else self._read_all_ranks(checkpoint)
        variables = _of_variables(shared)
        if isinstance(checkpoint, Checkpoint):
            on_workers = open_worker_tensors(checkpoint, shared.metadata.get(_ON_WORKERS, {}), self._timeout_seconds)
            for name, value in on_workers.items():
                (per_replica if is_replica_name(name) else variables)[name] = value
        python_values, generators = rank_shard.metadata["callbacks"], rank_shard.metadata["generators"]

        self._variables.check(variables, per_replica, description)
        self._python.check(python_values, all_present=same_workers)
        check_python_and_numpy(generators)

        self._variables.restore_shared(variables, description)
        self._variables.restore_per_replica(per_replica, description)
        if (shares := training_strategy(self._strategy).row_shares) is not None:
            shares.restore(shared.metadata.get(_ROW_SHARES))
        if metrics:
            self._variables.restore_metrics(per_replica, description)
            self._restore_late_metrics(per_replica, description)
            totals = training_strategy(self._strategy).metric_totals
            if totals is not None:  # of samples that a worker had counted which may be lost before the next step
                totals.store(*self._variables.metric_totals(self._read_all_ranks(checkpoint)))
        tensors = {**shared.tensors, **rank_shard.tensors}
        kept = {name: np.array(tensor) for name, tensor in tensors.items() if name.startswith(PYTHON_TENSORS)}
        self._python.restore(python_values, kept)
        restore_python_and_numpy(generators)

    def _restore_late_metrics(self, per_replica: dict[str, Any], description: dict[str, Any]) -> None:
        """Restores the metrics that the first step creates when they exist."""
        present = NamedVariables(self._trained).metrics
        missing = {
            name: np.array(value)  # the shard may be a file, whose memory is free when nothing refers to it
            for name, value in per_replica.items()
            if (variable := name.rpartition("@")[0]) not in present and self._trained.creates_later(variable)
        }

        def restore() -> None:
            present = NamedVariables(self._trained).metrics
            found = [name for name in missing if name.rpartition("@")[0] in present]
            self._variables.restore_metrics({name: missing.pop(name) for name in found}, description)

        self._trained.on_creation(restore)

    def _read_all_ranks(self, checkpoint: SavedTraining) -> dict[str, Any]:
        return merge_ranks([_of_variables(self._read_rank(checkpoint, rank)) for rank in range(checkpoint.num_ranks)])

    def _read_rank(self, checkpoint: SavedTraining, rank: int) -> Shard:
        saved = checkpoint.saved_ranks
        if rank in saved:
            return checkpoint.read_rank(rank)
        named = NamedVariables(self._trained)
        variables = {**named.per_replica, **named.metrics}
        summed = [name for name, variable in variables.items() if variable.rule in ("sum", "total")]
        return shard_of_missing_rank(checkpoint.read_rank(saved[0]), rank, summed)


def _of_variables(shard: Shard) -> dict[str, Any]:
    return {name: value for name, value in shard.tensors.items() if not name.startswith(PYTHON_TENSORS)}
