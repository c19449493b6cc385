"""A `keras.utils.PyDataset` with a known order, which can start in the middle."""

import copy
import random
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Json
from tfdist.data_position.py_dataset_hooks import BEGIN, END, PyDatasetHooks
from tfdist.data_position.python_randomness import global_states, set_global_states
from tfdist.data_position.read_ahead import OWN, ReadAhead, copy_changes
from tfdist.keras_internals.epoch_iterator import PY_DATASET, discard_read_ahead, has_workers, wrap_py_dataset
from tfdist.utils.json_state import from_text, unsupported_type


class PyDatasetView(keras.utils.PyDataset):
    """The batches of another PyDataset, pass by pass, shuffled by this class.

    Keras shuffles the numbers of the batches with Python's `random`, in a thread, when the first batch is requested;
    the view draws the same numbers in the caller's thread, and keeps the state of `random` before that.

    A thread reads batches ahead of training. The state that reading a batch changes (the global generators of NumPy and
    Python, the data's `get_state()`) is kept as it was before each batch, so that the next batch of the training can be
    read again with the same result.

    Attributes:
        hooks: Calls the data's hooks.
        state: The state of `random` before the order of this pass was drawn, as `random.getstate()` returns it; `None`
            if the pass is not shuffled.
    """

    def __init__(self, source: Any, shuffle: bool) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self.hooks = PyDatasetHooks(source)
        self.state: Any = None
        self._source = source
        self._shuffle = shuffle and source.num_batches is not None
        self._order: list[int] | None = None
        self._first = 0
        self._tracks_position = False
        self._is_read_in_order = source.workers <= 1 and not source.use_multiprocessing
        self._has_state = all(callable(getattr(source, name, None)) for name in ("get_state", "set_state"))
        self._own_at_begin: Any = None
        self._ahead = ReadAhead()
        self._last_own: Any = None
        self._pending: Json = {}

    @property
    def source_name(self) -> str:
        """The class name of the data."""
        return type(self._source).__name__

    @property
    def has_state(self) -> bool:
        """Whether the data has `get_state` and `set_state`."""
        return self._has_state

    def track_position(self) -> None:
        """Records from now on what `order` needs."""
        self._tracks_position = True
        self.hooks.track_position()
        if self._has_state and (why := self._why_state_is_unsupported()):
            self._has_state = False
            warnings.warn(
                f"The `get_state()` of a {self.source_name} is not saved. Received: {why}. Expected: "
                "numbers, strings, arrays, and lists and dictionaries (with strings for keys) of these. Return "
                "these types, or rename the method if it does not concern the order of the batches.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _why_state_is_unsupported(self) -> str | None:
        try:
            kind = unsupported_type(self._source.get_state())
        except Exception as error:  # an unrelated method of the same name, such as one with arguments
            return f"{type(error).__name__}: {error}"
        return None if kind is None else f"a value of type {kind}"

    def order(self, drawn: int | None) -> Json:
        """Returns what determines the next batches.

        Args:
            drawn: Number of batches of this pass trained on; `None` if a new pass comes next.
        """
        if self._has_state and (drawn is None or self._is_read_in_order):
            own: Any = copy.deepcopy(self._source.get_state())
        else:
            own = self._own_at_begin
        before: Json = {}
        if drawn is not None:
            before = self._ahead.before(drawn)
            own = before.pop(OWN, own)
        return {**self.hooks.order(), "random_state": self.state, "before": before, OWN: own}

    def restore(self, order: Json, within_epoch: bool) -> None:
        """Restores what `order` returned; the call of `on_epoch_begin` for a resumed epoch is left to Keras."""
        self._pending = dict(order["before"])
        if order[OWN] is None:
            self.hooks.repeat(order, within_epoch)
            return
        self.hooks.skip(order, within_epoch)
        self._source.set_state(copy.deepcopy(order[OWN]))
        if within_epoch:
            self._pending[OWN] = order[OWN]

    def begin_pass(self, first: int = 0, state: Any = None) -> None:
        """Begins a pass over the data.

        Args:
            first: The first batch of the pass to read, from 0.
            state: The state of `random` that determines the order; `None` for a new order.
        """
        self._first = first
        self._ahead.clear()
        self.state = self._order = None
        if self._shuffle:
            generator: Any = random
            if state is not None:
                generator = random.Random()
                generator.setstate(state)
            self.state = generator.getstate()
            self._order = list(range(self._source.num_batches))
            generator.shuffle(self._order)

    @property
    def num_batches(self) -> int | None:
        """Number of batches of this pass; `None` if endless."""
        return None if self._source.num_batches is None else max(self._source.num_batches - self._first, 0)

    def __getitem__(self, index: int) -> Any:
        number = self._first + index
        if not self._tracks_position or not self._is_read_in_order:
            return self._read(number)
        before = self._states()
        batch = self._read(number)
        self._ahead.record(number, before, self._states())
        return batch

    def on_epoch_begin(self) -> None:
        """Calls the data's hook; in a resumed epoch, then restores the states before the next batch."""
        present, pending = global_states(), self._pending
        self.hooks.call(BEGIN)
        if pending:
            self._pending = {}
            if OWN in pending:  # the restored state includes this call
                set_global_states(present)
                self._source.set_state(copy.deepcopy(pending[OWN]))
            set_global_states({name: from_text(state) for name, state in pending.items() if name != OWN})
        if self._has_state and self._tracks_position:
            self._own_at_begin = copy.deepcopy(self._source.get_state())

    def on_epoch_end(self) -> None:
        """Calls the data's hook."""
        self.hooks.call(END)

    def _read(self, number: int) -> Any:
        return self._source[number if self._order is None else self._order[number]]

    def _states(self) -> Json:
        if not self._has_state:
            return global_states()
        self._last_own = copy_changes(self._source.get_state(), self._last_own)
        return {**global_states(), OWN: self._last_own}


class PyDatasetSource(DatasetSource):
    """A `keras.utils.PyDataset`; batches are skipped by their numbers, without reading them."""

    kind = PY_DATASET
    needs_unused_iterators = False
    has_exact_spec = False

    def __init__(self, adapter: Any, dataset: Any, strategy: Any) -> None:
        super().__init__(adapter, dataset, strategy)
        self._view = wrap_py_dataset(adapter, PyDatasetView)
        self._first: tuple[int, Any] | None = None

    def track_position(self, steps_per_epoch: int | None) -> None:
        self._view.track_position()
        batches = self._view.num_batches
        if has_workers(self.adapter) and batches is not None and (steps_per_epoch or batches) < batches:
            warnings.warn(
                "The order of this PyDataset cannot be repeated: Keras stops its workers after every epoch, in the "
                "middle of a pass over the data. After a restart some samples may be seen twice and others not at "
                f"all. Received: steps_per_epoch={steps_per_epoch} of {batches} batches, with workers. "
                "Expected: `workers=1` without multiprocessing, or complete passes. Leave `steps_per_epoch` out.",
                RuntimeWarning,
                stacklevel=2,
            )

    def order(self, drawn: int | None) -> Json:
        return self._view.order(drawn)

    def check(self, order: Json, drawn: Sequence[int], replay: bool) -> None:
        if order["own"] is not None and not self._view.has_state:
            raise ValueError(
                "The checkpoint holds the `get_state()` of a PyDataset, which this one cannot restore. "
                f"Received: {self._view.source_name} without these methods. Expected: `get_state()` and "
                "`set_state(state)`, as before. Give `fit` the same data, or start a new training in another directory."
            )

    def begin_epoch(self, number: int) -> None:
        first, self._first = self._first, None
        self._view.begin_pass(*(first or ()))
        discard_read_ahead(self.adapter)

    def replay_iterators(self, drawn: Sequence[int]) -> int:
        return 0

    def restore(self, order: Json, batches: int | None, within_epoch: bool) -> None:
        self._view.restore(order, within_epoch)
        self._first = None if batches is None else (batches, order["random_state"])

    def iterator_at(self, batches: int) -> Any:
        return self.iterator()
