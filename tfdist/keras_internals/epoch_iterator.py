"""Keras' epoch iterator: how it is extended, equal numbers of steps on all workers, and the data that it draws from."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, trainer
from tfdist.keras_internals.scheduled_training import training_of
from tfdist.patches import patch, replace
from tfdist.private_symbols import has_reached, private
from tfdist.strategy_hooks import hooks_of

_FREED_BY_OTHERS_AFTER_SECONDS, _POLL_SECONDS = 10.0, 0.01
# Keras 3.10 numbers an execution of several steps by its first step only, also for `on_train_batch_end`.
_has_last_step = has_reached("keras", "3.11")


def last_step(model: Any, batch: int) -> int:
    """Returns the last step of the execution after which Keras calls `on_train_batch_end(batch)`, as of Keras 3.11."""
    return batch if _has_last_step else batch + int(model.steps_per_execution) - 1


_ADAPTERS = "keras.src.trainers.data_adapters"
ARRAYS, DATASET, PY_DATASET, GENERATOR = "arrays", "tf.data.Dataset", "keras.utils.PyDataset", "generator"
GRAIN, TORCH = "Grain dataset", "DataLoader of PyTorch"
_KINDS = {
    private(f"{_ADAPTERS}.array_data_adapter:ArrayDataAdapter", "shuffles without a generator that can be saved"): (
        ARRAYS
    ),
    private(f"{_ADAPTERS}.tf_dataset_adapter:TFDatasetAdapter", "holds the dataset that was given to `fit`"): DATASET,
    private(f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter", "shuffles in a thread, with `random`"): PY_DATASET,
    private(f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter", "can be read only once"): GENERATOR,
    private(f"{_ADAPTERS}.torch_data_loader_adapter:TorchDataLoaderAdapter", "makes its iterators itself"): TORCH,
    private(  # the path is not put together, as for all symbols of later versions: a test reads it
        "keras.src.trainers.data_adapters.grain_dataset_adapter:GrainDatasetAdapter", "likewise", since="3.11"
    ): GRAIN,
}


class EpochIteratorMixin:
    """Base of extensions of Keras' epoch iterator, and their view of its private state.

    Attributes:
        steps_per_epoch: The argument of `fit`.
        steps_per_execution: The argument of `compile`.
    """

    steps_per_epoch: int | None
    steps_per_execution: int
    _current_iterator: Any
    _distribute_strategy: Any
    _distributed_dataset: Any
    _num_batches: int | None
    _steps_seen: int

    @property
    def data_adapter(self) -> Any:
        """Keras' adapter of the data."""
        return self.__dict__["data_adapter"]

    @data_adapter.setter
    def data_adapter(self, adapter: Any) -> None:
        self.__dict__["data_adapter"] = adapter
        self.prepare_adapter(adapter)

    def prepare_adapter(self, adapter: Any) -> None:
        """Called before Keras makes a dataset of its adapter."""

    def iterator_factory(self) -> Callable[[], Any] | None:
        """Returns a function that creates the next iterator; `None` for Keras' own iterator."""
        return None

    def enumerate_steps(self, steps: Iterator[tuple[int, int, Any]]) -> Iterator[tuple[int, int, Any]]:
        """Yields the steps of an epoch.

        `steps` are Keras', each with its first and last number and the iterator. They have not started yet.
        """
        return steps

    @property
    def dataset(self) -> Any:
        """The dataset that iterators are created from, distributed under a strategy."""
        return self._distributed_dataset

    @property
    def strategy(self) -> Any:
        return self._distribute_strategy

    @property
    def num_batches_of_pass(self) -> int | None:
        """Number of batches of one pass over the data; `None` if unknown."""
        return self._num_batches

    @num_batches_of_pass.setter
    def num_batches_of_pass(self, number: int | None) -> None:
        self._num_batches = number

    @property
    def batches_drawn(self) -> int:
        """Number of batches drawn from the iterator in use."""
        return self._steps_seen

    @batches_drawn.setter
    def batches_drawn(self, number: int) -> None:
        self._steps_seen = number

    @property
    def has_iterator(self) -> bool:
        """Whether Keras holds an iterator for the next epoch."""
        return self._current_iterator is not None

    def drop_iterator(self) -> None:
        """Makes the next epoch create an iterator."""
        self._current_iterator = None

    def _get_iterator(self) -> Any:
        factory = self.iterator_factory()
        return super()._get_iterator() if factory is None else factory()  # type: ignore[misc]

    def _enumerate_iterator(self) -> Iterator[Any]:
        steps = super()._enumerate_iterator()  # type: ignore[misc]
        if _has_last_step:
            return self.enumerate_steps(steps)
        more = self.steps_per_execution - 1
        with_last = self.enumerate_steps((first, first + more, iterator) for first, iterator in steps)
        return ((first, iterator) for first, _, iterator in with_last)


@patch
def extend_epoch_iterator(mixin: type[EpochIteratorMixin]) -> None:
    """Mixes `mixin` into the class of the epoch iterators that Keras creates from now on; once."""
    stock = trainer.TFEpochIterator
    replace(trainer, "TFEpochIterator")(type(stock.__name__, (mixin, stock), {"__module__": stock.__module__}))


@patch
def patch_loops_over_epochs() -> None:
    """Lets strategies agree on the batches of an epoch, and learn of its steps and of the error that ends it.

    Keras takes the number of batches from the worker's own dataset; a worker with fewer batches would stop while the
    others wait for it in a collective. Logs that are not results of metrics are those of one worker.
    """
    stock = trainer.TFEpochIterator

    class HookedEpochIterator(stock):  # type: ignore[misc, valid-type]
        """Keras' epoch iterator, which calls the hooks of the strategy."""

        _num_batches: int | None
        _distributed_dataset: Any
        _last_iterator: Any = None  # from which the last step was drawn

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._is_over_training_data = "class_weight" in kwargs  # only training has them
            strategy, own_batches = self._distribute_strategy, self._num_batches
            self._num_batches = hooks_of(strategy).agree_on_batches(strategy, own_batches)
            self._distributed_dataset = hooks_of(strategy).carry_counts(
                strategy, self._distributed_dataset, own_batches
            )

        def reset(self) -> None:
            super().reset()
            strategy = self._distribute_strategy
            self._num_batches = hooks_of(strategy).agree_on_batches(strategy, self._num_batches)

        def __next__(self) -> Any:
            hooks_of(self._distribute_strategy).before_step(self._distribute_strategy)
            step = super().__next__()
            if step[-1] is not self._last_iterator:
                self._free_last_iterator()
                self._last_iterator = step[-1]
            return step

        def _free_last_iterator(self) -> None:
            if self._last_iterator is not None:
                iterators, self._last_iterator = [self._last_iterator], None
                _free_elsewhere(iterators)

        @contextmanager
        def catch_stop_iteration(self) -> Iterator[None]:
            batches, strategy = self._num_batches, self._distribute_strategy
            has_number = batches is not None and batches > 0 and batches % self.steps_per_execution == 0
            knows_end = has_number and self.steps_per_epoch is None
            asks = getattr(self._distributed_dataset, "_enable_get_next_as_optional", False)
            hooks_of(strategy).begin_epoch(strategy, self._is_over_training_data, knows_end or not asks)
            is_complete = False
            try:
                with super().catch_stop_iteration():
                    yield
                is_complete = True
            except BaseException as error:
                hooks_of(strategy).on_error(strategy, error)
                raise
            finally:
                hooks_of(strategy).end_epoch(strategy, self._is_over_training_data and is_complete)
                if not self._is_over_training_data:  # the next pass may be an epoch later
                    self._free_last_iterator()

    HookedEpochIterator.__name__ = stock.__name__
    replace(trainer, "TFEpochIterator")(HookedEpochIterator)
    results_or_logs = TensorFlowTrainer._get_metrics_result_or_logs

    @replace(TensorFlowTrainer, "_get_metrics_result_or_logs")
    def logs_of_epoch(self: Any, logs: Any) -> Any:
        training, strategy = training_of(self), self.distribute_strategy
        chosen = results_or_logs(self, logs if training is None else training.logs_of_all_steps() or logs)
        have_same = hooks_of(strategy).mean_of_workers(strategy, []) is None
        if have_same or not isinstance(chosen, dict) or chosen.keys() == self.get_metrics_result().keys():
            return chosen
        numbers = {name: value for name, value in chosen.items() if _is_number(value)}
        means = hooks_of(strategy).mean_of_workers(strategy, list(numbers.values()))
        return chosen if means is None else {**chosen, **dict(zip(numbers, means, strict=True))}


def _free_elsewhere(iterator: list[Any]) -> None:
    """Frees an iterator of TensorFlow on another thread, when only this list refers to it.

    Freeing one waits for the thread that tunes it, which may miss its end and sleep for as long as the iterator has
    lived, up to 60 s (TensorFlow 2.21, on busy cores).
    """

    def free() -> None:
        limit = time.monotonic() + _FREED_BY_OTHERS_AFTER_SECONDS
        # The list, and the argument of the call, refer to it.
        while sys.getrefcount(iterator[0]) > 2 and threading.main_thread().is_alive() and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        iterator.clear()

    with suppress(RuntimeError):  # no thread can be started: the caller frees it
        threading.Thread(target=free, name="tfdist freed iterator").start()


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) and getattr(value, "shape", ()) == ()


def data_kind(adapter: Any) -> str:
    """Returns the kind of data behind an adapter: a constant of this module, or else the adapter's class name."""
    return _KINDS.get(type(adapter), type(adapter).__name__)


def shuffle_argument(adapter: Any) -> Any:
    """Returns the `shuffle` that `fit` was given, for an adapter of arrays."""
    return adapter._shuffle


def wrap_py_dataset(adapter: Any, wrap: Callable[[Any, bool], Any]) -> Any:
    """Replaces an adapter's PyDataset by `wrap(py_dataset, shuffle)`, which shuffles itself, and returns it."""
    wrapper = wrap(adapter.py_dataset, adapter.shuffle)
    adapter.py_dataset, adapter.shuffle = wrapper, False
    return wrapper


def wrap_generator(adapter: Any, wrap: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]]) -> Callable[[], Any]:
    """Makes each iterator over an adapter's Python generator draw from `wrap(stock)`; returns `stock`.

    `stock` returns an iterator over the batches that Keras has drawn to see their shapes, and over all others.
    """
    stock: Callable[[], Iterator[Any]] = adapter.generator
    adapter.generator = lambda: wrap(stock)
    return stock


def has_workers(adapter: Any) -> bool:
    """Whether threads or processes read the batches of an adapter's PyDataset."""
    return adapter.enqueuer is not None


def discard_read_ahead(adapter: Any) -> None:
    """Discards the batches that the workers of an adapter's PyDataset have read ahead.

    A pass that ended early, as one that builds the model, leaves batches in the queue, and perhaps a thread that still
    takes some.
    """
    if has_workers(adapter):
        data = adapter.py_dataset
        adapter.enqueuer = type(adapter.enqueuer)(data, data.workers, data.use_multiprocessing, data.max_queue_size)
