"""An epoch iterator that knows its position in the data, and can go on from one."""

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tfdist.keras_internals.data_source import DataSource
from tfdist.keras_internals.data_sources import source_of
from tfdist.keras_internals.running_fit import claim_fit, fit_validated_by, install_running_fit
from tfdist.keras_internals.same_data import PositionLike, check_same_data
from tfdist.keras_internals.symbols import trainer
from tfdist.private_symbols import private

_EPOCH_ITERATOR = "keras.src.trainers.epoch_iterator:EpochIterator"
for _method, _why in {
    "_enumerate_iterator": "numbers the steps of an epoch from 0",
    "_get_iterator": "makes the iterators",
    "reset": "forgets the iterator that the model was built with",
}.items():
    private(f"{_EPOCH_ITERATOR}.{_method}", _why)


@dataclass(frozen=True)
class Skipped:
    """What coming back to a position has cost.

    Attributes:
      iterators: iterators made again, but for the one that training goes on with.
      batches: batches read again, or passed over by their number, that training had seen.
      seconds: the time for all of it, in seconds. Batches are passed over when the first epoch begins, so it is whole
        from the first `on_train_batch_begin` on.
    """

    iterators: int = 0
    batches: int = 0
    seconds: float = 0.0


def install_resumable_iterator() -> None:
    """Makes the training iterator of every `fit` from now on one that knows its position; to be called again at will.

    It extends the class that is there, whether that is Keras' own or tfdist's, and may be extended in turn.
    """
    install_running_fit()
    if not issubclass(trainer.TFEpochIterator, ResumableIterator):
        stock = trainer.TFEpochIterator
        made = type(stock.__name__, (ResumableIterator, stock), {"__module__": stock.__module__})
        trainer.TFEpochIterator = made


class Validation:
    """What was drawn of the validation data of a `fit`.

    Attributes:
      before: how many batches were drawn of each iterator before this `fit` went on.
      shares_a_shuffle: whether its iterators move the order of the training data on.
      iterator: its epoch iterator; `None` until there is one.
    """

    def __init__(self, before: tuple[int, ...] = (), shares_a_shuffle: bool = False) -> None:
        self.before = before
        self.shares_a_shuffle = shares_a_shuffle
        self.iterator: ResumableIterator | None = None

    def drawn(self) -> tuple[int, ...]:
        """How many batches were drawn of each iterator until now."""
        iterator = self.iterator
        if iterator is None:
            return self.before
        return (*iterator._finished, *([iterator._steps_seen] if iterator._is_open else []))


class ResumableIterator:
    """Mixed into Keras' epoch iterator, before it. One that is not the training data's does what it always did.

    Keras' own code numbers the steps and decides when an iterator is made; this class counts what it does, hands it
    an iterator from the middle of the data, and passes over the numbers of steps that have been made.
    """

    _current_iterator: Any
    _distribute_strategy: Any
    _distributed_dataset: Any
    _num_batches: int | None
    _steps_seen: int
    data_adapter: Any
    steps_per_epoch: int | None
    steps_per_execution: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source: DataSource | None = None
        self._finished: list[int] = []
        self._is_open = False  # whether an iterator has been made that is not in `_finished`
        self._may_make = True
        self._resuming: PositionLike | None = None
        self._follows = False
        self._validation = Validation()
        self._traits: dict[str, Any] | None = None
        self.skipped = Skipped()
        if claim_fit(self, kwargs):
            self._source = source_of(self.data_adapter, self._distributed_dataset, self._distribute_strategy)

    @property
    def element_spec(self) -> Any:
        """The structure of `tf.TypeSpec`s of the batches; `None` where the data does not tell."""
        return getattr(self._distributed_dataset, "element_spec", None)

    def follow(self) -> None:
        """To be called before training when positions will be asked for; warns of data that cannot be had again."""
        if self._source is not None and not self._follows:
            self._source.follow(self.steps_per_epoch)
            self._follows = True

    def position(self, next_step: int) -> dict[str, Any]:
        """The position behind the steps made so far, as the fields of a `Position`.

        Args:
          next_step: the step of the epoch that comes next, from 0; 0 at the end of an epoch.
        """
        source = self._source_in_fit()
        continues = next_step > 0 or (bool(self.steps_per_epoch) and self._current_iterator is not None)
        current = self._steps_seen if self._is_open and continues else None
        over = [self._steps_seen] if self._is_open and not continues else []
        return {
            "next_step": next_step,
            "finished": (*self._finished, *over),
            "current": current,
            **self._data(),
            "order": source.order(current),
            "validated": self._validation.drawn(),
            "is_validated_by_itself": self._validation.shares_a_shuffle,
        }

    def _data(self) -> dict[str, Any]:
        """What must be the same in a run that goes on."""
        source = self._source_in_fit()
        if self._traits is None:  # finding them out takes a while: all functions of the pipeline are read
            self._traits = {
                "source": source.kind,
                "batch_size": source.batch_size,
                "elements": source.elements(),
                "is_each_workers_own": source.is_each_workers_own(),
            }
        counts = ("steps_per_epoch", "steps_per_execution")
        return {"num_batches": self._num_batches, **{name: getattr(self, name) for name in counts}, **self._traits}

    def resume_at(self, position: PositionLike, *, replay: bool = False, same_workers: bool = True) -> None:
        """Makes the next epoch go on at `position`; to be called in `on_train_begin`.

        Args:
          position: where to go on.
          replay: whether data that only begins anew may be drawn and thrown away up to there.
          same_workers: whether as many workers train as when the position was taken.

        Raises:
          ValueError: the data is drawn otherwise than when the position was taken.
          RuntimeError: the data cannot be had again from there.
        """
        source = self._source_in_fit()
        is_shared_out_anew = position.is_each_workers_own and not same_workers
        now = {**self._data(), **({"num_batches": None} if is_shared_out_anew else {})}
        check_same_data(position, now, same_workers=same_workers)
        self._check_unused(position)
        if is_shared_out_anew and (position.next_step or position.current):
            _tell_of_shares()
        drawn = position.finished if position.current is None else (*position.finished, position.current)
        source.check(position.order, drawn, replay)
        missing = position.finished[len(self._finished) :]
        began = time.perf_counter()
        others = position.validated if position.is_validated_by_itself else ()
        batches = source.repeat_iterators((*missing, *others))
        source.restore(position.order, position.current, position.next_step > 0)
        self.skipped = Skipped(len(missing) + len(others), batches, time.perf_counter() - began)
        self._finished = list(position.finished)
        if not is_shared_out_anew:
            self._num_batches = position.num_batches
        self._validation = Validation(position.validated, position.is_validated_by_itself)
        self._resuming = position

    def reset(self) -> None:
        """Begins anew, as Keras does before training; what has been drawn stays drawn."""
        self._close()
        super().reset()  # type: ignore[misc]

    def _check_unused(self, position: PositionLike) -> None:
        if self._is_open or len(self._finished) > len(position.finished) + (position.current is not None):
            raise RuntimeError(
                "The training data has been drawn from more often than in the run that is to go on. Received: "
                f"{len(self._finished) + self._is_open} iterators. Expected: at most {len(position.finished)}, and "
                "none in use. Call `resume_at` in `on_train_begin`, under the strategy that the training began with."
            )

    def _source_in_fit(self) -> DataSource:
        if self._source is None:
            raise RuntimeError(
                "Only the training data of a `fit` has a position. Received: an iterator of `evaluate`, of `predict`, "
                "of validation data, or one made before `install_resumable_iterator`. Install it before `fit`."
            )
        return self._source

    def _close(self) -> None:
        if self._is_open:
            self._finished.append(self._steps_seen)
            self._is_open = False

    def _get_iterator(self) -> Any:
        if self._source is not None:
            return _Made(self._make_iterator)
        fit = fit_validated_by(self)
        if fit is not None and isinstance(fit.iterator, ResumableIterator):
            return _Made(functools.partial(self._make_validation_iterator, fit.iterator))
        return super()._get_iterator()  # type: ignore[misc]

    def _make_validation_iterator(self, training: "ResumableIterator") -> Any:
        source = source_of(self.data_adapter, self._distributed_dataset, self._distribute_strategy, keeps_order=True)
        validation = training._validation
        if validation.iterator is not self:
            validation.iterator = self
            self._finished = list(validation.before)
            if not validation.shares_a_shuffle:
                source.repeat_iterators(validation.before)
            validation.shares_a_shuffle = source.shares_a_shuffle(training._source_in_fit())
        self._close()
        self._is_open = True
        return source.iterator()

    def _make_iterator(self) -> Any:
        source = self._source_in_fit()
        self._close()
        if not self._may_make:
            return iter(())
        self._may_make = source.makes_ahead
        self._is_open = True
        position, self._resuming = self._resuming, None
        if position is None or position.current is None:
            return source.iterator()
        began = time.perf_counter()
        batches, decisive = position.current, source.decisive_batches()
        if self._num_batches is not None and batches >= self._num_batches and not source.runs_python:
            if decisive is not None:
                batches = min(batches, decisive)  # none is left: only what it does to the next iterators matters
        iterator = source.iterator_at(batches)
        seconds = self.skipped.seconds + time.perf_counter() - began
        self.skipped = Skipped(self.skipped.iterators, self.skipped.batches + batches, seconds)
        return iterator

    def _enumerate_iterator(self) -> Iterator[tuple[int, int, Any]]:
        steps = super()._enumerate_iterator()  # type: ignore[misc]
        source, position = self._source, self._resuming
        if source is None:
            yield from steps
            return
        self._may_make = source.makes_ahead
        if self._current_iterator is None or self.steps_per_epoch is None:
            self._may_make = True
            source.begin_epoch(len(self._finished) + self._is_open)
        done = 0 if position is None else position.next_step
        before = 0 if position is None or position.current is None else position.current - done
        for _ in range(done // self.steps_per_execution):
            next(steps, None)
        # What was drawn of this iterator in earlier epochs; Keras has counted from 0 for one that it has just got.
        self._steps_seen += before if done else 0
        for step in steps:
            if not done:
                self._steps_seen += before
                before = 0
            yield step
        if not source.makes_ahead and not self._is_open:
            self._current_iterator = None  # the next epoch makes it


def _tell_of_shares() -> None:
    warnings.warn(
        "The data is shared out among another number of workers than before the restart, and each has samples of its "
        "own: by files, or by `distribute_datasets_from_function`. In this pass over the data some samples may come "
        "twice and others not at all; the next ones are whole. To go on exactly, have workers take their parts of "
        "common batches (`AutoShardPolicy.DATA`).",
        RuntimeWarning,
        stacklevel=2,
    )


class _Made:
    """What Keras takes for a data set: its iterator is made by `make`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Any:
        return self._make()
