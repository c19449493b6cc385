"""The tf.data pipelines that `fit` draws from: what determines their order, and how to start in the middle.

Arrays, and the data of `tfdist.data`, are pipelines whose order is known better. Python generators, and datasets that
the workers of parameter servers create, have no position.
"""

import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import tensorflow as tf

from tfdist.data_position.position import Json, describe_elements
from tfdist.data_position.python_randomness import PythonRandomness, global_states, set_global_states, states_equal
from tfdist.data_position.read_ahead import ReadAhead
from tfdist.keras_internals.epoch_iterator import (
    ARRAYS,
    DATASET,
    GENERATOR,
    data_kind,
    shuffle_argument,
    wrap_generator,
)
from tfdist.tensorflow_internals.batch_selection import selectable
from tfdist.tensorflow_internals.input_pipeline import (
    batch_size,
    batches_to_replay,
    create_unused_iterator,
    distributed_alike,
    has_unseeded,
    is_per_worker,
    is_unordered,
    python_functions,
    random_seeds,
    runs_python,
    share_a_shuffle,
    skip_steps,
)
from tfdist.tensorflow_internals.runtime import global_seed, global_seed_for_functions
from tfdist.utils.json_state import from_text

_SEEDS = 1 << 31  # of the orders in which Keras shuffles arrays


class DatasetSource:
    """A tf.data pipeline, plain or distributed. Keras turns every kind of data into one, so this is the base class."""

    kind = DATASET  # in positions and error messages
    # Whether the iterator that Keras creates at the end of an epoch, and often discards, must be created: it advances
    # the order of a shuffle.
    needs_unused_iterators = True
    has_one_pass = False  # whether a new pass ends the one before
    has_exact_spec = True  # whether the shapes in `element_spec` hold for all batches, not only for those seen so far

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        """Args as in `resumable_iterator.source_for`."""
        self.adapter = adapter
        self.dataset = dataset
        self.strategy = strategy
        self._python: PythonRandomness | None = None
        self._restored: Json | None = None

    def track_position(self, steps_per_epoch: int | None) -> None:
        """Prepares for calls of `order`; warns if the order cannot be repeated. Called once, before training."""
        if runs_python(self.dataset):
            self._python = PythonRandomness(python_functions(self.dataset))
        if is_unordered(self.dataset):
            warnings.warn(
                "The order of this data cannot be repeated: elements may come in the order in which they are ready. "
                "After a restart training resumes at the right step, but some samples of the epoch may be seen twice "
                "and others not at all. Received: `deterministic=False`, in the options of the dataset or in one of "
                "its transformations. Expected: `deterministic=True` or unset.",
                RuntimeWarning,
                stacklevel=2,
            )
        if has_unseeded(random_seeds(self.dataset)):
            warnings.warn(
                "The order of this data cannot be repeated: a shuffle or a random operation has no seed. After a "
                "restart training resumes at the right step, but some samples of the epoch may be seen twice and "
                "others not at all. Call `keras.utils.set_random_seed` before you create the dataset, or give "
                "`shuffle(…, seed=…)`.",
                RuntimeWarning,
                stacklevel=2,
            )

    def order(self, drawn: int | None) -> Json:
        """Returns what determines the next samples, beside the numbers of batches drawn, as values of `json_state`.

        `drawn` is the number of batches drawn from the iterator in use; `None` if the next epoch creates a new one.
        """
        python = None if self._python is None else self._python.states(within_pass=drawn is not None)
        return {"seeds": random_seeds(self.dataset), "python": python}

    def end_pass(self, drawn: int) -> None:
        """Called before `order(None)`: `drawn` batches were drawn from the last iterator."""

    def close(self) -> None:
        """Frees what reads ahead; the training has ended."""

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """Raises or warns if the order cannot be repeated; draws nothing.

        `order` and the numbers of batches `drawn` from each iterator are of before the restart. With `replay`, batches
        of data without a position may be drawn and discarded.
        """
        seeds = random_seeds(self.dataset)
        if order["seeds"] != seeds and not has_unseeded(order["seeds"]):
            warnings.warn(
                "The data comes in another order than before the restart: some samples of this epoch may be seen twice "
                f"and others not at all. Received: seeds {seeds} of its shuffles. Expected: "
                f"{order['seeds']}. Call `keras.utils.set_random_seed` before you create the dataset, or give "
                "`shuffle(…, seed=…)`.",
                RuntimeWarning,
                stacklevel=2,
            )

    def begin_epoch(self, number: int) -> None:
        """Called in the main thread before an epoch whose iterator is number `number` of this `fit`, from 0."""

    def shares_a_shuffle(self, other: "DatasetSource") -> bool:
        """Whether an iterator over one advances the order of the other."""
        return share_a_shuffle(self.dataset, other.dataset)

    @property
    def batch_size(self) -> int | None:
        """Number of samples in a batch of all workers; `None` if unknown."""
        return batch_size(self.dataset) if self.has_exact_spec else None

    def elements(self) -> list[Any] | None:
        """Returns `describe_elements` of the batches; `None` if unknown."""
        try:
            return describe_elements(self.dataset.element_spec, is_exact=self.has_exact_spec)
        except AttributeError:
            return None

    def is_per_worker(self) -> bool:
        """Whether each worker has a different position, in different data."""
        return is_per_worker(self.dataset)

    @property
    def runs_python(self) -> bool:
        """Whether Python code that may draw random numbers creates the samples."""
        return self._python is not None

    def iterator(self) -> Any:
        """Returns a new iterator from the beginning."""
        if self._python is not None:
            self._python.begin_pass()
        return iter(self.dataset)

    def batches_to_replay(self) -> int | None:
        """Returns how many batches of an iterator must be drawn so that later orders are right; `None`: all."""
        return batches_to_replay(self.dataset) if self.needs_unused_iterators else 0

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        """Advances the order as iterators did from which these numbers of batches were drawn.

        Returns the number of batches drawn for it.
        """
        limit, total = self.batches_to_replay(), 0
        for number in drawn:
            number = number if limit is None else min(number, limit)
            if number:
                total += _draw(iter(self.dataset), number)
            else:
                create_unused_iterator(self.dataset)
        return total

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        """Restores the `order` of before the restart for the next iterator.

        `batches` were drawn from the iterator in use; `None` if the next epoch creates a new one. `within_epoch` says
        whether training resumes in the middle of an epoch.
        """
        self._restored = order.get("python")
        if self._python is not None and self._restored is not None and batches is None:
            self._python.restore(self._restored)

    def iterator_at(self, batches: int) -> Any:
        """Returns an iterator from which the first `batches` batches have been drawn."""
        if self._python is None or self._restored is None:
            return self._iterator_at(batches)
        with self._python.replay_pass(self._restored):
            return self._iterator_at(batches)

    def _iterator_at(self, batches: int) -> Any:
        # tf.data skips all batches but the last; drawing the last one waits for it.
        remaining_dataset = skip_steps(self.dataset, batches - 1) if batches > 1 else None
        iterator = iter(self.dataset if remaining_dataset is None else remaining_dataset)
        _draw(iterator, batches if remaining_dataset is None else 1)
        return iterator


def _draw(iterator: Any, batches: int) -> int:
    """Draws up to `batches` batches; returns how many there were."""
    for drawn in range(batches):
        try:
            next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return drawn
    return batches


class ArraySource(DatasetSource):
    """NumPy arrays and tensors: repeats the order in which Keras shuffles them.

    With a global seed of TensorFlow, Keras' shuffle gives every epoch the same order, derived from that seed. Without
    one the orders differ and cannot be repeated: then every epoch's dataset is traced with a seed chosen here.
    """

    kind = ARRAYS
    needs_unused_iterators = False

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        super().__init__(adapter, dataset, strategy)
        self._shuffle = shuffle_argument(adapter)
        self._seed = global_seed()
        self._own_seed = secrets.randbelow(_SEEDS) if self._shuffle and self._seed is None else None
        self._tracks_position = False

    @property
    def batch_size(self) -> int | None:
        return self.adapter.batch_size

    def track_position(self, steps_per_epoch: int | None) -> None:
        self._tracks_position = True

    def order(self, drawn: int | None) -> Json:
        return {"seed": self._seed if self._shuffle else None, "own_seed": self._own_seed}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        if (order == {"seed": None, "own_seed": None}) == bool(self._shuffle):
            raise ValueError(
                f"`shuffle` differs from that of the checkpoint. Received: shuffle={self._shuffle!r}. "
                f"Expected: `shuffle={not self._shuffle}`, with which the training began."
            )

    def begin_epoch(self, number: int) -> None:
        if self._tracks_position and self._own_seed is not None:
            self._trace_with((self._own_seed + number) % _SEEDS)

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return 0

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        if order["seed"] is not None and order["seed"] != self._seed:
            self._trace_with(order["seed"])
        self._seed, self._own_seed = order["seed"], order["own_seed"]

    def _trace_with(self, seed: int) -> None:
        with global_seed_for_functions(seed):
            self.dataset = self.strategy.experimental_distribute_dataset(self.adapter.get_tf_dataset())


class SelectableSource(DatasetSource):
    """A dataset of `tfdist.data`.

    The rows of a batch depend on the number of streams, whose default depends on the number of workers. After a restart
    with other workers the training resumes with the streams of the checkpoint.
    """

    def order(self, drawn: int | None) -> Json:
        return {**super().order(drawn), "streams": self._streams}

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        super().restore(order, batches, within_epoch)
        original = selectable(self.dataset)
        if original is not None and order.get("streams", self._streams) != self._streams:
            self.dataset = distributed_alike(self.dataset, original.select(streams=order["streams"]))

    @property
    def _streams(self) -> int:
        original = selectable(self.dataset)
        return 1 if original is None else original.selection.streams


class GeneratorSource(DatasetSource):
    """A Python generator, or data of an unknown adapter: its batches can only be counted.

    A Python generator may draw from the global generators of NumPy and Python, in a thread that reads ahead. So its
    seen batches are drawn again from the states when the pass began, and the next one from the states before it.
    """

    needs_unused_iterators = False
    has_exact_spec = False

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        super().__init__(adapter, dataset, strategy)
        self._batches: Callable[[], Iterator[Any]] | None = None  # None: no Python generator
        if self.kind == GENERATOR:
            self._batches = wrap_generator(adapter, self._draw)
        self._rest: tuple[int, Iterator[Any]] | None = None
        self._tracks_position = False
        self._at_begin: Json = {}
        self._before_next: Json = {}
        self._ahead = ReadAhead()

    @property
    def kind(self) -> str:  # type: ignore[override]
        return data_kind(self.adapter)

    def track_position(self, steps_per_epoch: int | None) -> None:
        self._tracks_position = True

    def order(self, drawn: int | None) -> Json:
        if self._batches is None or drawn is None:
            return {}
        return {"at_begin": self._at_begin, "before": self._ahead.before(drawn)}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        if not any(drawn):
            return
        if not replay:
            raise RuntimeError(
                f"Training cannot resume: its data is a {self.kind}, which cannot be resumed in the middle. Received: "
                f"{sum(drawn)} batches drawn before the restart. Expected: a tf.data.Dataset, a keras.utils.PyDataset, "
                "a Grain dataset, torchdata's StatefulDataLoader or arrays. Or allow `replay` (`replay_data=True` of "
                "FailureRecovery), which draws and discards the same number of batches; the generator must then yield "
                "the same batches in every run."
            )
        if len(drawn) > 1:
            raise RuntimeError(
                f"The batches of a {self.kind} cannot be counted: {len(drawn)} iterators have drawn from it, each "
                f"reading ahead. Received: {list(drawn)} batches. Expected: one iterator, by `steps_per_epoch` and an "
                "endless generator. Use a tf.data.Dataset or a keras.utils.PyDataset instead."
            )

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        """Draws the seen batches now: the caller then restores the states of the random generators."""
        if self._batches is None or batches is None:
            return
        present = global_states()
        set_global_states(order.get("at_begin", {}))
        began, remaining_batches = global_states(), self._batches()
        for _ in islice(remaining_batches, batches):
            pass
        ended = global_states()
        set_global_states(present)
        drawn = {name: state for name, state in ended.items() if not states_equal(began[name], state)}
        before = {name: from_text(state) for name, state in order.get("before", {}).items()}
        self._at_begin, self._before_next, self._rest = began, drawn | before, (batches, remaining_batches)

    def iterator(self) -> Any:
        self._at_begin = global_states()
        self._ahead.clear()
        return super().iterator()

    def iterator_at(self, batches: int) -> Any:
        if self._rest is None:
            return super().iterator_at(batches)
        set_global_states(self._before_next)
        return iter(self.dataset)

    def _draw(self, stock: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields the batches of an iterator, in a thread of tf.data."""
        (number, batches), self._rest = self._rest or (0, stock()), None
        while True:
            before = global_states() if self._tracks_position else {}
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._tracks_position:
                self._ahead.record(number, before, global_states())
            number += 1
            yield batch


class WorkerDatasetSource(GeneratorSource):
    """Endless datasets that the workers of parameter servers create; they have no position.

    Which worker draws how many batches depends on timing; after a restart the datasets start from the beginning.
    """

    kind = "data of workers"

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """There is nothing to compare."""

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return 0

    def iterator_at(self, batches: int) -> Any:
        return self.iterator()
