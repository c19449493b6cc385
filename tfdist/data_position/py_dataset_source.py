"""A `keras.utils.PyDataset` with a known order, which can start in the middle.

Its hooks often shuffle; after a restart their calls are repeated. What a hook draws from the global generators of NumPy
and Python depends on everything drawn before. So the state before each call that draws is saved, and restored when the
call is repeated.
"""

import copy
import random
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdist.data_position.dataset_source import DatasetSource
from tfdist.data_position.position import Json
from tfdist.data_position.python_randomness import global_states, set_global_states, states_equal
from tfdist.data_position.read_ahead import OWN, ReadAhead, copy_changes
from tfdist.keras_internals.epoch_iterator import PY_DATASET, discard_read_ahead, has_workers, wrap_py_dataset
from tfdist.utils.json_state import from_text, to_text, unsupported_type

AttributeOrders = dict[str, list[int]]  # by attribute: number of elements, hash of the elements, hash of their order

BEGIN, END = 0, 1
_NAMES = ("on_epoch_begin", "on_epoch_end")
_MOST_STATES = 1000  # of 3 KB each, in every checkpoint
_LONGEST_ARRAY = 1 << 20
_LONGEST_LIST = 1 << 15


def attribute_orders(instance: Any) -> AttributeOrders:
    """Describes the arrays, lists and tuples of numbers and strings among the attributes of `instance`.

    Very long ones are left out.

    >>> class Data: pass
    >>> one, other = Data(), Data()
    >>> one.indexes, other.indexes = np.array([0, 1, 2]), np.array([2, 0, 1])
    >>> reordered(attribute_orders(one), attribute_orders(other))
    ['indexes']
    """
    orders: AttributeOrders = {}
    for name, value in list(getattr(instance, "__dict__", {}).items()):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and 1 < value.size <= _LONGEST_ARRAY:
            flat = np.ascontiguousarray(value).reshape(-1)
            bits = flat.view(f"u{flat.itemsize}" if flat.itemsize <= 8 else "u1").astype("u8")
            content = zlib.crc32(np.array([bits.sum(dtype="u8"), (bits * bits).sum(dtype="u8")]).tobytes())
            orders[name] = [value.size, content, zlib.crc32(flat.tobytes())]
        elif isinstance(value, list | tuple) and 1 < len(value) <= _LONGEST_LIST:
            if all(isinstance(item, str | bytes | int | float | np.number) for item in value):
                parts = [repr(item) for item in value]
                content, order = (zlib.crc32("\n".join(texts).encode()) for texts in (sorted(parts), parts))
                orders[name] = [len(parts), content, order]
    return orders


def reordered(one: AttributeOrders, other: AttributeOrders) -> list[str]:
    """Returns the attributes that hold the same elements in another order."""
    both = [name for name in one if name in other]
    return [name for name in both if one[name][:2] == other[name][:2] and one[name][2] != other[name][2]]


class PyDatasetHooks:
    """Calls `on_epoch_begin` and `on_epoch_end` of a PyDataset."""

    def __init__(self, source: Any) -> None:
        self.calls = [0, 0]  # number of calls of each of the two so far
        self._source = source
        self._tracks_position = self._is_repeating = False
        self._orders: AttributeOrders = {}
        self._initial_hashes = {name: zlib.crc32(repr(state).encode()) for name, state in global_states().items()}
        self._first_run_hashes = self._initial_hashes  # of the run that saved the first checkpoint
        # The states before each call, as text; `None` for a state that the previous call left.
        self._draws: list[tuple[int, int, Json]] = []
        self._left: Json = {}
        self._to_repeat: dict[tuple[int, int], Json] = {}
        self._shown: set[str] = set()  # attributes that show what was drawn
        self._hidden: set[str] = set()  # generators whose draws show in no attribute
        self._unclassified = {BEGIN, END}  # hooks not yet seen to draw
        self._expected: Json | None = None

    def track_position(self) -> None:
        """Records the data's attributes from now on, which takes time if they are large."""
        self._tracks_position = True
        self._orders = attribute_orders(self._source)

    def call(self, hook: int) -> None:
        """Calls a hook, `BEGIN` or `END`."""
        self.calls[hook] += 1
        number = self.calls[hook]
        repeated, present = self._to_repeat.pop((hook, number), None), global_states()
        started = present
        if repeated is not None:
            states = {
                name: self._left.get(name) if state is None else from_text(state) for name, state in repeated.items()
            }
            set_global_states({name: state for name, state in states.items() if state is not None})
            started = global_states()
        looks = (self._tracks_position or number == 1) and not self._is_repeating and not self._is_empty(hook)
        classifies = looks and hook in self._unclassified
        before = attribute_orders(self._source) if classifies else {}
        getattr(self._source, _NAMES[hook])()
        after = global_states()
        if looks:
            self._orders = attribute_orders(self._source)
        drawn = [name for name in after if not states_equal(started[name], after[name])]
        if drawn:
            if repeated is None:
                self._record(hook, number, {name: started[name] for name in drawn})
            if classifies:
                shown = [name for name in self._orders if before.get(name) != self._orders[name]]
                self._shown.update(shown)
                self._hidden.update([] if shown else drawn)
                self._unclassified.discard(hook)
        self._left.update({name: after[name] for name in drawn})
        if repeated is not None:
            set_global_states(present)
        if not self._is_repeating:
            self._warn_if_reordered()

    def order(self) -> Json:
        """Returns what determines the present order of the data."""
        return {
            "hooks": list(self.calls),
            "draws": [list(draw) for draw in self._draws],
            "initial_hashes": self._first_run_hashes,
            "orders": self._orders,
            "shown": sorted(self._shown),
            "hidden": sorted(self._hidden),
        }

    def repeat(self, order: Json, within_epoch: bool) -> None:
        """Repeats the calls made before `order` was taken.

        In the middle of an epoch the last call of `on_epoch_begin` is left to Keras.
        """
        begins, ends = order["hooks"][BEGIN] - within_epoch, order["hooks"][END]
        made = {(hook, number): states for hook, number, states in self._draws}
        self._draws = [(hook, number, states) for hook, number, states in order["draws"]]
        self._to_repeat = {(hook, number): states for hook, number, states in self._draws}
        self._shown, self._hidden = set(order["shown"]), set(order["hidden"])
        self._first_run_hashes = order["initial_hashes"]
        self._expected, self._is_repeating = order, True
        for hook, number in [call for call in made if not states_equal(made[call], self._to_repeat.get(call))]:
            # Keras made this call before the checkpoint was known. A hook that draws a new order may be called twice.
            self.calls[hook] = number - 1
            self.call(hook)
        while self.calls[END] < ends:
            if self.calls[BEGIN] < begins and self.calls[BEGIN] <= self.calls[END]:
                self.call(BEGIN)
            self.call(END)
        while self.calls[BEGIN] < begins:
            self.call(BEGIN)
        self._is_repeating = False
        self._orders = attribute_orders(self._source)
        self._warn_if_reordered()

    def skip(self, order: Json, within_epoch: bool) -> None:
        """Counts those calls without making them, for data whose state is restored by `set_state`."""
        self.calls = [order["hooks"][BEGIN] - within_epoch, order["hooks"][END]]

    def _record(self, hook: int, number: int, states: Json) -> None:
        if len(self._draws) >= _MOST_STATES:
            return
        saved_states = {
            name: None if states_equal(state, self._left.get(name)) else to_text(state)
            for name, state in states.items()
        }
        self._draws.append((hook, number, saved_states))
        if len(self._draws) == _MOST_STATES and self._tracks_position:
            name = type(self._source).__name__
            warnings.warn(
                f"The hooks of a {name} have drawn random numbers in so many calls that checkpoints record no more of "
                f"them. Received: {_MOST_STATES} calls that drew from `np.random` or `random`. Expected: fewer. After "
                f"a restart in a later epoch its order will differ: give {name} the methods `get_state` and "
                "`set_state`, or let it draw from its own `np.random.default_rng(seed)`.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _is_empty(self, hook: int) -> bool:
        return getattr(type(self._source), _NAMES[hook], None) is getattr(keras.utils.PyDataset, _NAMES[hook])

    def _warn_if_reordered(self) -> None:
        """Warns if the order differs from that of the resumed run, once the same number of calls have been made."""
        expected = self._expected
        if expected is None or self.calls != expected["hooks"]:
            return
        self._expected = None
        orders: AttributeOrders = expected["orders"]
        differing = reordered(orders, self._orders)
        differing += [name for name in expected["shown"] if orders.get(name) != self._orders.get(name)]
        unsure = [name for name in expected["hidden"] if expected["initial_hashes"][name] != self._initial_hashes[name]]
        if not differing and not unsure:
            return
        name = type(self._source).__name__
        if differing:
            difference = f"its attribute {differing[0]!r} differs"
        else:
            difference = f"its hooks draw from the generator of {unsure[0]}, whose state before `fit` was different"
        warnings.warn(
            f"The batches of a {name} come in another order than before the restart. Received: {difference}. Expected: "
            "the same random numbers in every run. Some samples of this epoch may be seen twice and others not at "
            f"all. Give {name} the methods `get_state` and `set_state`, let it draw from its own "
            "`np.random.default_rng(seed)`, or call `keras.utils.set_random_seed` first.",
            RuntimeWarning,
            stacklevel=2,
        )


class PyDatasetView(keras.utils.PyDataset):
    """The batches of another PyDataset, pass by pass, shuffled by this class.

    Keras shuffles the numbers of the batches with Python's `random`, in a thread, when the first batch is requested;
    the view draws the same numbers in the caller's thread, and keeps the state of `random` before that.

    A thread reads batches ahead of training. The state that reading a batch changes (the global generators of NumPy and
    Python, the data's `get_state()`) is kept as it was before each batch, so that the next batch of the training can be
    read again with the same result.
    """

    def __init__(self, source: Any, shuffle: bool) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self.hooks = PyDatasetHooks(source)
        self.state: Any = None  # of `random` before the order of this pass was drawn; None if it is not shuffled
        self._source = source
        self._shuffle = shuffle and source.num_batches is not None
        self._order: list[int] | None = None
        self._first = 0
        self._tracks_position = False
        self._is_read_in_order = source.workers <= 1 and not source.use_multiprocessing
        self.has_state = all(callable(getattr(source, name, None)) for name in ("get_state", "set_state"))
        self._own_at_begin: Any = None
        self._ahead = ReadAhead()
        self._last_own: Any = None
        self._pending: Json = {}

    @property
    def source_name(self) -> str:
        """The class name of the data."""
        return type(self._source).__name__

    def track_position(self) -> None:
        """Records from now on what `order` needs."""
        self._tracks_position = True
        self.hooks.track_position()
        if self.has_state and (why := self._why_state_is_unsupported()):
            self.has_state = False
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

        `drawn` batches of this pass were trained on; `None`: a new pass comes next.
        """
        if self.has_state and (drawn is None or self._is_read_in_order):
            own_state: Any = copy.deepcopy(self._source.get_state())
        else:
            own_state = self._own_at_begin
        before: Json = {}
        if drawn is not None:
            before = self._ahead.before(drawn)
            own_state = before.pop(OWN, own_state)
        return {**self.hooks.order(), "random_state": self.state, "before": before, OWN: own_state}

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
        """Begins a pass with batch `first`, in the order of a `state` of `random`, or in a new one."""
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
        if self.has_state and self._tracks_position:
            self._own_at_begin = copy.deepcopy(self._source.get_state())

    def on_epoch_end(self) -> None:
        """Calls the data's hook."""
        self.hooks.call(END)

    def _read(self, number: int) -> Any:
        return self._source[number if self._order is None else self._order[number]]

    def _states(self) -> Json:
        if not self.has_state:
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
