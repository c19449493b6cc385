"""The data of custom loops: pipelines of tf.data, loaders that save their own position, and sequences."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data_position.dataset_source import DatasetSource, SelectableSource
from tfdist.data_position.loader_source import LoaderSource
from tfdist.data_position.position import Json
from tfdist.data_position.python_randomness import global_states, set_global_states
from tfdist.tensorflow_internals.batch_selection import selectable
from tfdist.utils.json_state import from_text, to_text
from tfdist.utils.state_methods import StateMethods, state_methods


def source_of_loop(data: Any, strategy: Any, *, replay: bool) -> DatasetSource:
    """Returns the source behind the data of a custom loop.

    Args:
        data: A `tf.data.Dataset`, plain or distributed; a dataset of Grain or torchdata's `StatefulDataLoader`, whose
            batches become tensors, divided among the replicas; another iterable with `state_dict` and
            `load_state_dict` or `get_state` and `set_state`; a sequence; or, with `replay`, any iterable.
        strategy: That of the loop.
        replay: Whether data without a position is drawn again from its beginning.

    Raises:
        ValueError: The data has no position, and `replay` is False.
    """
    if isinstance(data, tf.data.Dataset | tf.distribute.DistributedDataset):
        return (DatasetSource if selectable(data) is None else SelectableSource)(None, data, strategy)
    if (loader := LoaderSource.of_loop(data, strategy)) is not None:
        return loader
    if (methods := state_methods(data)) is not None and isinstance(data, Iterable):
        return _StatefulSource(data, strategy, methods)
    if isinstance(data, Sequence) or (replay and isinstance(data, Iterable)):
        return _ReplayedSource(data, strategy)
    raise ValueError(
        f"This data has no position at which a loop could resume. Received: {type(data).__name__}. Expected: a "
        "`tf.data.Dataset`, a sequence, a dataset of Grain, or an iterable with `state_dict` and `load_state_dict` or "
        "`get_state` and `set_state`. If a generator yields the same batches in every run, `replay_data=True` draws "
        "them again; of a `PyDataset`, draw the numbers of its batches: `range(len(data))`."
    )


class _PythonSource(DatasetSource):
    """Data that is drawn in Python, in the thread of the loop, by each worker for itself."""

    has_exact_spec = False

    def is_per_worker(self) -> bool:
        return True

    def track_position(self, steps_per_epoch: int | None) -> None:
        """There is nothing to prepare."""

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """There is nothing to compare."""

    def iterator(self) -> Iterator[Any]:
        return iter(self.dataset)


class _StatefulSource(_PythonSource):
    """An iterable that saves its position itself, with that of passes that have ended."""

    kind = "data with its own state"

    def __init__(self, data: Any, strategy: Any, methods: StateMethods) -> None:
        super().__init__(None, data, strategy)
        self._methods = methods

    def order(self, drawn: int | None) -> Json:
        return {"state": self._methods.get()}

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return 0

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        self._methods.set(order["state"])

    def iterator_at(self, batches: int) -> Iterator[Any]:
        return self.iterator()


class _ReplayedSource(_PythonSource):
    """An iterable that yields the same batches in every run, from the states of the generators when a pass began."""

    kind = "data that is drawn again"

    def __init__(self, data: Any, strategy: Any) -> None:
        super().__init__(None, data, strategy)
        self._at_begin: Json = {}
        self._rest: Iterator[Any] | None = None

    def order(self, drawn: int | None) -> Json:
        return {} if drawn is None else {"at_begin": {name: to_text(one) for name, one in self._at_begin.items()}}

    def iterator(self) -> Iterator[Any]:
        self._at_begin = global_states()
        return super().iterator()

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return sum(_skip(super(_ReplayedSource, self).iterator(), number) for number in drawn)

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        if batches is not None:
            set_global_states({name: from_text(text) for name, text in order["at_begin"].items()})
            self._rest = self.iterator()
            _skip(self._rest, batches)

    def iterator_at(self, batches: int) -> Iterator[Any]:
        assert self._rest is not None
        return self._rest


def _skip(iterator: Iterator[Any], batches: int) -> int:
    return sum(1 for _ in itertools.islice(iterator, batches))
