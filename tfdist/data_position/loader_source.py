"""Data of a loader that has a state: datasets of Grain, torchdata's `StatefulDataLoader`.

The iterator of a pass is made here, in the thread of the training, and read in a thread of tf.data, ahead of training.
So its state is kept as it was before each batch.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Json
from tfdist.data_position.python_randomness import global_states, set_global_states
from tfdist.data_position.read_ahead import OWN, ReadAhead, States
from tfdist.data_position.stateful_loaders import StatefulLoader, stateful_loader
from tfdist.keras_internals.epoch_iterator import data_kind
from tfdist.keras_internals.loader_adapters import draw_batches_from, loader_adapter
from tfdist.utils.json_state import from_text, to_text, unsupported_type


@dataclass
class _Pass:
    """A pass over the data."""

    iterator: Iterator[Any]
    drawn: int  # number of batches, also before a restart
    own: Any  # the state of the loader before the next batch, if positions are tracked
    first: list[Any] = field(default_factory=list)  # a batch that was drawn before tf.data asked for it
    has_reader: bool = False


class LoaderSource(DatasetSource):
    """A loader that has a state, with which it is asked for no batch again that was drawn before a restart."""

    needs_unused_iterators = False
    has_one_pass = True
    has_exact_spec = False

    def __init__(self, adapter: Any, loader: StatefulLoader) -> None:
        """Makes the datasets of Keras' `adapter` draw from this source. The dataset is set once there is one."""
        super().__init__(adapter, None, None)
        self._loader = loader
        self._tracks_position = False
        self._begin: Callable[[], Iterator[Any]] = loader.iterator  # of the next pass
        self._before_next: States = {}  # of the generators of Python and NumPy
        self._own: Any = None  # the state of the loader when the last pass began
        self._drawn_in_last_pass: int | None = None
        self._ahead = ReadAhead()
        self._lock = threading.Lock()
        self._pass: _Pass | None = None
        draw_batches_from(adapter, self._batches)

    @classmethod
    def of_adapter(cls, adapter: Any, data: Any) -> "LoaderSource | None":
        """Returns the source of `data`, for which Keras has made `adapter`; `None` if it is no loader with a state."""
        loader = stateful_loader(data_kind(adapter), data)
        return None if loader is None else cls(adapter, loader)

    @classmethod
    def of_loop(cls, data: Any, strategy: Any) -> "LoaderSource | None":
        """Returns the source of the data of a custom loop; `None` if it is no loader with a state."""
        adapter = loader_adapter(data)
        source = None if adapter is None else cls.of_adapter(adapter, data)
        if source is not None:
            source.dataset = strategy.experimental_distribute_dataset(source.adapter.get_tf_dataset())
            source.strategy = strategy
        return source

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self._loader.kind

    @property
    def batch_size(self) -> int | None:
        return self.adapter.batch_size

    def track_position(self, steps_per_epoch: int | None) -> None:
        self.close()  # the pass that has built the model
        self._tracks_position = True

    def end_pass(self, drawn: int) -> None:
        self._drawn_in_last_pass = drawn

    def order(self, drawn: int | None) -> Json:
        number = self._drawn_in_last_pass if drawn is None else drawn
        before = {} if number is None else self._ahead.before(number)
        own = before.pop(OWN, self._own)
        if drawn is None:
            own, before = None if own is None else self._loader.state_between(own), {}
        if (kind := unsupported_type(own)) is not None:
            raise ValueError(
                f"The position of a {self.kind} cannot be saved. Received: a state with a value of type {kind}. "
                "Expected: numbers, strings, bytes, arrays, tensors, and lists and dictionaries of these. Return these "
                "types in the `state_dict` or `get_state` of the dataset and its transformations."
            )
        return {OWN: None if own is None else to_text(own), "before": before}

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        """There is nothing to compare: the loader itself refuses a state that is not its own."""

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return 0

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        self._before_next = {name: from_text(state) for name, state in order["before"].items()}
        if order[OWN] is None:
            return
        self._own = from_text(order[OWN])
        self._begin = partial(self._loader.iterator_after if batches is None else self._loader.iterator_at, self._own)

    def iterator(self) -> Any:
        with self._lock:
            self._start(0)
        return iter(self.dataset)

    def iterator_at(self, batches: int) -> Any:
        with self._lock:
            present = self._start(batches)
            try:
                present.first.append(self._read(present))
            except StopIteration:
                if not batches:
                    # Keras knows that this pass has ended, and asks for no batch. The thread of tf.data might start
                    # later, and read the next pass.
                    return iter(())
        return iter(self.dataset)

    def close(self) -> None:
        with self._lock:
            self._pass = None

    def _start(self, drawn: int) -> _Pass:
        begin, self._begin = self._begin, self._loader.iterator
        set_global_states(self._before_next)
        self._before_next = {}
        self._pass = None  # frees the iterator, which may have processes
        try:
            iterator = begin()
        except Exception as error:
            if not isinstance(begin, partial):
                raise
            raise ValueError(
                f"The {self.kind} cannot continue from the position of the checkpoint. Received: "
                f"{type(error).__name__}: {error} Expected: the loader with which the training began, with the same "
                "data source, sampler, transformations and number of workers. Give `fit` the same data, or start a new "
                "training in another directory."
            ) from error
        self._ahead.clear()
        if self._tracks_position:
            self._own = self._loader.state(iterator)
        self._drawn_in_last_pass = drawn
        self._pass = _Pass(iterator, drawn, self._own)
        return self._pass

    def _batches(self) -> Iterator[Any]:
        """Yields the batches of the present pass, in a thread of tf.data."""
        present = self._pass
        if present is None or present.has_reader:
            return
        present.has_reader = True
        while True:
            with self._lock:
                if present is not self._pass:  # tf.data reads ahead of a training that has left this pass
                    return
                try:
                    batch = present.first.pop() if present.first else self._read(present)
                except StopIteration:
                    return
            yield batch

    def _read(self, present: _Pass) -> Any:
        """Draws a batch, and records the states that this changes."""
        if not self._tracks_position:
            return next(present.iterator)
        common = global_states() if self._loader.draws_in_order else {}
        batch, before = next(present.iterator), present.own
        present.own = self._loader.state(present.iterator)
        after = global_states() if common else {}
        self._ahead.record(present.drawn, {**common, OWN: before}, {**after, OWN: present.own})
        present.drawn += 1
        return batch
