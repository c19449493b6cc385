"""An epoch iterator that knows its position in the data and can resume at one."""

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfdist.data_position.dataset_source import (
    ArraySource,
    DatasetSource,
    GeneratorSource,
    SelectableSource,
    WorkerDatasetSource,
)
from tfdist.data_position.loader_source import LoaderSource
from tfdist.data_position.position import Json, Position, check_same_data, logs_to_save
from tfdist.data_position.py_dataset_source import PyDatasetSource
from tfdist.keras_internals.epoch_iterator import EpochIteratorMixin, data_kind, extend_epoch_iterator
from tfdist.keras_internals.running_fit import (
    RunningFit,
    fit_validating_with,
    is_of_training,
    register_training_iterator,
    running_fit,
    track_running_fits,
)
from tfdist.tensorflow_internals.batch_selection import selectable
from tfdist.tensorflow_internals.input_pipeline import reshuffles
from tfdist.tensorflow_internals.rows_per_replica import batch_spec

_SOURCES: dict[str, type[DatasetSource]] = {
    source.kind: source for source in (ArraySource, DatasetSource, PyDatasetSource)
}
# An attribute of a shuffle: the data of complete trainings that were not repeated, with their positions at the end.
# Freed with the dataset of the program, unlike in a list of this module.
_NOT_REPEATED = "_tfdist_not_repeated"


@dataclass(frozen=True)
class ResumeCost:
    """What resuming at a position has cost."""

    iterators: int = 0  # created again, without the one in use
    batches: int = 0  # seen ones that were read again or skipped
    seconds: float = 0.0  # batches are skipped when the first epoch begins, so complete from `on_train_batch_begin` on


def patch_epoch_iterator() -> None:
    """Makes the training iterator of every later `fit` a `ResumableIterator`. More calls have no effect.

    Extends the present class, Keras' or one that extends it, and may be extended in turn.
    """
    track_running_fits()
    extend_epoch_iterator(ResumableIterator)


def source_for(adapter: Any, dataset: Any, strategy: Any, *, for_validation: bool = False) -> DatasetSource:
    """Returns the source behind one of Keras' data adapters, for the dataset that iterators are created from.

    The order of validation data changes between passes only if it is a tf.data pipeline: no other kind is treated
    apart.
    """
    if for_validation:
        return DatasetSource(adapter, dataset, strategy)
    if getattr(adapter, "is_drawn_by_workers", False):
        return WorkerDatasetSource(adapter, dataset, strategy)
    if selectable(dataset) is not None:  # it can be built again for a part of its batches
        return SelectableSource(adapter, dataset, strategy)
    return _SOURCES.get(data_kind(adapter), GeneratorSource)(adapter, dataset, strategy)


@dataclass
class ValidationProgress:
    """What has been drawn from the validation data of a `fit`."""

    before: tuple[int, ...] = ()  # numbers of batches drawn from each iterator before this `fit` resumed
    shares_a_shuffle: bool = False  # whether its iterators advance the order of the training data
    iterator: "ResumableIterator | None" = None  # its epoch iterator, once it exists

    def drawn(self) -> tuple[int, ...]:
        """Returns the number of batches drawn from each iterator so far."""
        return self.before if self.iterator is None else self.iterator._drawn()


class ResumableIterator(EpochIteratorMixin):
    """Mixed into Keras' epoch iterator. An iterator over anything but training data behaves as before.

    Keras' code numbers the steps and decides when an iterator is created; this class counts both, provides an iterator
    from the middle of the data, and skips the numbers of steps already made.
    """

    _source: DatasetSource | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._data_of_training = kwargs.get("x") if is_of_training(kwargs) else None
        super().__init__(*args, **kwargs)
        self._finished: list[int] = []
        self._is_open = False  # whether an iterator exists that is not in `_finished`
        self._may_create = True
        self._resuming: Position | None = None
        self._fit: RunningFit | None = None
        self._validation = ValidationProgress()
        self._traits: Json | None = None
        self.resume_cost = ResumeCost()
        if not is_of_training(kwargs):
            return
        register_training_iterator(self)
        if self._source is None:
            self._source = source_for(self.data_adapter, self.dataset, self.strategy)
        else:
            self._source.dataset, self._source.strategy = self.dataset, self.strategy
        _repeat_shuffles_of(self._source)

    def prepare_adapter(self, adapter: Any) -> None:
        if self._data_of_training is not None:
            self._source, self._data_of_training = LoaderSource.of_adapter(adapter, self._data_of_training), None

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the batches; `None` if unknown."""
        return batch_spec(self.dataset) if hasattr(self.dataset, "element_spec") else None

    def track_position(self, fit: RunningFit) -> None:
        """Prepares for calls of `position` in `fit`; warns if the order of the data cannot be repeated."""
        if self._source is not None and self._fit is None:
            self._source.track_position(self.steps_per_epoch)
            fit.on_end(self._source.close)
        self._fit = fit

    def on_fit_end(self, function: Callable[[], object]) -> None:
        """Calls `function` when the `fit` of `track_position` ends, also by an exception."""
        if self._fit is not None:
            self._fit.on_end(function)

    def position(self, next_step: int, logs: Mapping[str, Any] | None = None) -> Position:
        """Returns the position after the steps made so far.

        `next_step` is the next one of the epoch: `batch + 1` in `on_train_batch_end(batch)`, 0 in `on_epoch_end`.
        `logs` are those that `on_train_batch_end` received: numbers and arrays. They are required if this was the
        epoch's last step and a custom `train_step` logs anything other than its metrics.
        """
        source = self._training_source()
        continues = next_step > 0 or (bool(self.steps_per_epoch) and self.has_iterator)
        current = self.batches_drawn if self._is_open and continues else None
        if current is None and (drawn := self._drawn()):
            source.end_pass(drawn[-1])
        return Position(
            next_step=next_step,
            finished=tuple(self._finished) if continues else self._drawn(),
            current=current,
            **self._data(),
            order=source.order(current),
            validation_drawn=self._validation.drawn(),
            validation_shares_shuffle=self._validation.shares_a_shuffle,
            logs=logs_to_save(logs),
        )

    def resume_at(self, position: Position, *, replay: bool = False, same_workers: bool = True) -> None:
        """Makes the first epoch of this `fit` resume at `position`. Call this once, in `on_train_begin`.

        `start_at_epoch` sets the number of that epoch. May run the data's code (a PyDataset's hooks, batches drawn
        again), so restore the random generators of Python, NumPy and Keras afterwards.

        With `replay`, batches of a Python generator, which cannot be resumed in the middle, may be drawn and discarded
        up to there: it must yield the same batches in every run. Without `same_workers`, the number of workers has
        changed since the position was taken; if each worker has different data, a warning says what that means.

        Raises:
            ValueError: If the data, or the arguments of `fit`, are not those of the run to resume.
            RuntimeError: If the data cannot be resumed: a generator without `replay`, or data that more iterators
                were created over than before.
        """
        source = self._training_source()
        is_resharded = position.is_per_worker and not same_workers
        now = {**self._data(), **({"num_batches": None} if is_resharded else {})}
        check_same_data(position, now, same_workers=same_workers)
        self._check_unused(position)
        if is_resharded and (position.next_step or position.current):
            warn_of_resharding()
        source.check(position.order, position.drawn, replay)
        missing = position.finished[len(self._finished) :]
        validation_drawn = position.validation_drawn if position.validation_shares_shuffle else ()
        started = time.perf_counter()
        batches = source.replay_iterators((*missing, *validation_drawn))
        source.restore(position.order, position.current, position.next_step > 0)
        self.resume_cost = ResumeCost(len(missing) + len(validation_drawn), batches, time.perf_counter() - started)
        self._finished = list(position.finished)
        if not is_resharded:
            self.num_batches_of_pass = position.num_batches
        self._validation = ValidationProgress(position.validation_drawn, position.validation_shares_shuffle)
        self._resuming = position
        if self._fit is not None and position.next_step > 0:
            self._fit.set_epoch_logs(position.logs)

    def pass_over(self, position: Position) -> None:
        """This `fit` trains nothing, as its training was complete at `position`.

        Later ones that draw from the same `tf.data` shuffle get it as that training has left it.
        """
        source = self._training_source()
        if position.source == source.kind == DatasetSource.kind:
            for shuffle in reshuffles(source.dataset):
                setattr(shuffle, _NOT_REPEATED, [*getattr(shuffle, _NOT_REPEATED, ()), (source, position)])

    def reset(self) -> None:
        """Starts again, as Keras does before training; batches already drawn stay counted."""
        self._close()
        super().reset()  # type: ignore[misc]

    def _data(self) -> dict[str, Any]:
        """Returns what a resumed run must have in common with this one."""
        source = self._training_source()
        if self._traits is None:  # expensive: reads all functions of the pipeline
            self._traits = {
                "source": source.kind,
                "batch_size": source.batch_size,
                "elements": source.elements(),
                "is_per_worker": source.is_per_worker(),
            }
        counts = {name: getattr(self, name) for name in ("steps_per_epoch", "steps_per_execution")}
        return {"num_batches": self.num_batches_of_pass, **counts, **self._traits}

    def _drawn(self) -> tuple[int, ...]:
        return (*self._finished, *([self.batches_drawn] if self._is_open else []))

    def _check_unused(self, position: Position) -> None:
        if self._is_open or len(self._finished) > len(position.drawn):
            raise RuntimeError(
                "More iterators have been created over the training data than in the run to resume. Received: "
                f"{len(self._finished) + self._is_open} iterators. Expected: at most {len(position.finished)}, and "
                "none in use. Call `resume_at` in `on_train_begin`, under the strategy that the training began with."
            )

    def _training_source(self) -> DatasetSource:
        if self._source is None:
            raise RuntimeError(
                "Only the training data of a `fit` has a position. Received: an iterator of `evaluate`, `predict` or "
                "validation data, or one created before `patch_epoch_iterator`. Call that before `fit`."
            )
        return self._source

    def _close(self) -> None:
        if self._is_open:
            self._finished.append(self.batches_drawn)
            self._is_open = False

    def iterator_factory(self) -> Callable[[], Any] | None:
        if self._source is not None:
            return self._create_iterator
        fit = fit_validating_with(self)
        if fit is not None and isinstance(fit.iterator, ResumableIterator):
            return functools.partial(self._create_validation_iterator, fit.iterator)
        return None

    def _create_validation_iterator(self, training: "ResumableIterator") -> Any:
        source = source_for(self.data_adapter, self.dataset, self.strategy, for_validation=True)
        validation = training._validation
        if validation.iterator is not self:
            validation.iterator = self
            self._finished = list(validation.before)
            if not validation.shares_a_shuffle:
                source.replay_iterators(validation.before)
            validation.shares_a_shuffle = source.shares_a_shuffle(training._training_source())
        self._close()
        self._is_open = True
        return source.iterator()

    def _create_iterator(self) -> Any:
        source = self._training_source()
        self._close()
        if not self._may_create:
            return iter(())
        self._may_create = source.needs_unused_iterators
        self._is_open = True
        position, self._resuming = self._resuming, None
        if position is None or position.current is None:
            return source.iterator()
        started = time.perf_counter()
        batches, enough = position.current, source.batches_to_replay()
        is_exhausted = self.num_batches_of_pass is not None and batches >= self.num_batches_of_pass
        if is_exhausted and enough is not None and not source.runs_python:
            batches = min(batches, enough)  # only its effect on later iterators matters
        iterator = source.iterator_at(batches)
        cost = self.resume_cost
        seconds = cost.seconds + time.perf_counter() - started
        self.resume_cost = ResumeCost(cost.iterators, cost.batches + batches, seconds)
        return iterator

    def enumerate_steps(self, steps: Iterator[tuple[int, int, Any]]) -> Iterator[tuple[int, int, Any]]:
        source, position = self._source, self._resuming
        if source is None:
            yield from steps
            return
        self._may_create = source.needs_unused_iterators
        if not self.has_iterator or self.steps_per_epoch is None:
            self._may_create = True
            source.begin_epoch(len(self._finished) + self._is_open)
        done = 0 if position is None else position.next_step
        before = 0 if position is None or position.current is None else position.current - done
        for _ in range(done // self.steps_per_execution):
            next(steps, None)
        # Batches drawn from this iterator in earlier epochs; Keras counts from 0 for a new iterator.
        self.batches_drawn += before if done else 0
        for step in steps:
            if not done:
                self.batches_drawn += before
                before = 0
            yield step
        if not source.needs_unused_iterators and not self._is_open:
            self.drop_iterator()  # the next epoch creates it


def training_iterator(model: Any) -> ResumableIterator:
    """Returns the training data of the running `fit` of `model`. Call this in `on_train_begin` or later.

    The first call of a `fit` warns about data whose order another process cannot repeat.

    Raises:
        RuntimeError: If no `fit` of `model` runs in this thread, or it began before `patch_epoch_iterator`.
    """
    fit = _running_fit(model)
    iterator: ResumableIterator = fit.iterator
    iterator.track_position(fit)
    return iterator


def start_at_epoch(model: Any, epoch: int | None) -> None:
    """Makes the running `fit` of `model`, and no later one, begin with `epoch`. Call this in `on_train_begin`.

    With epoch 0 or `None`, `fit` begins with its `initial_epoch`.

    Raises:
        RuntimeError: If no `fit` of `model` runs in this thread, or it began before `patch_epoch_iterator`.
    """
    _running_fit(model).start_at_epoch(epoch)


def _repeat_shuffles_of(source: DatasetSource) -> None:
    """Advances the order of the data of a `fit` as complete trainings did that were not repeated."""
    if source.kind != DatasetSource.kind:
        return
    trainings = [one for shuffle in reshuffles(source.dataset) for one in shuffle.__dict__.pop(_NOT_REPEATED, ())]
    for earlier, position in {id(earlier): (earlier, position) for earlier, position in trainings}.values():
        for shuffle in reshuffles(earlier.dataset):
            shuffle.__dict__.pop(_NOT_REPEATED, None)
        validation_drawn = position.validation_drawn if position.validation_shares_shuffle else ()
        earlier.replay_iterators((*position.drawn, *validation_drawn))
        earlier.restore(position.order, None, False)


def warn_of_resharding() -> None:
    """Warns that a position in data that each worker reads for itself does not fit another number of workers."""
    warnings.warn(
        "The number of workers has changed since the checkpoint, and each worker reads different data: by files, or by "
        "`distribute_datasets_from_function`. In this pass over the data some samples may be seen twice and others not "
        "at all; later passes are complete. To resume exactly, let workers take their parts of common batches "
        "(`AutoShardPolicy.DATA`).",
        RuntimeWarning,
        stacklevel=2,
    )


def _running_fit(model: Any) -> RunningFit:
    fit = running_fit(model)
    if fit is None or not isinstance(fit.iterator, ResumableIterator):
        raise RuntimeError(
            "The training data of a model is known only while `fit` runs. Received: a model "
            f"({getattr(model, 'name', model)!r}) that is not being trained, or whose `fit` began before tfdist "
            "patched Keras. Expected: a call in a callback, in `on_train_begin` or later, and "
            "`patch_epoch_iterator()` before `fit`."
        )
    return fit
