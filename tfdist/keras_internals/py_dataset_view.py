"""A `keras.utils.PyDataset` whose order is known, and which can begin in the middle."""

import copy
import random
import warnings
from typing import Any

import keras

from tfdist.keras_internals.py_dataset_hooks import BEGIN, END, PyDatasetHooks
from tfdist.keras_internals.random_states import global_states, set_global_states, unpacked
from tfdist.keras_internals.read_ahead import OWN, ReadAhead, copied, unsavable

Json = dict[str, Any]


class PyDatasetView(keras.utils.PyDataset):
    """Another PyDataset's batches, pass by pass, in an order that it draws itself.

    Keras shuffles the numbers of the batches with Python's `random`, in a thread, when the first batch is asked for;
    the view draws the same in the caller's thread, and keeps the state that it began with.

    Batches are read ahead of training, by a thread. What reading a batch changes (the global generators of NumPy and
    Python, the state that the data set tells of by `get_state`) is kept as it was before each one, so that the batch
    that is trained on next can be read again, and the same.

    Attributes:
      hooks: calls the data's hooks.
      state: the state of `random` before the order of this pass was drawn, as `random.getstate()` has it; `None` if
        the pass is not shuffled.
    """

    def __init__(self, source: Any, shuffle: bool) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self.hooks = PyDatasetHooks(source)
        self.state: Any = None
        self._source = source
        self._shuffle = shuffle and source.num_batches is not None
        self._order: list[int] | None = None
        self._first = 0
        self._follows = False
        self._is_read_in_turn = source.workers <= 1 and not source.use_multiprocessing
        self._keeps_state = all(callable(getattr(source, name, None)) for name in ("get_state", "set_state"))
        self._own_at_begin: Any = None
        self._ahead = ReadAhead()
        self._last_own: Any = None
        self._pending: Json = {}

    @property
    def source_name(self) -> str:
        """The class of the data."""
        return type(self._source).__name__

    @property
    def keeps_state(self) -> bool:
        """Whether the data has `get_state` and `set_state`."""
        return self._keeps_state

    def follow(self) -> None:
        """Has it keep from now on what `order` needs."""
        self._follows = True
        self.hooks.follow()
        if self._keeps_state and (why := self._cannot_be_kept()):
            self._keeps_state = False
            warnings.warn(
                f"The state that a {self.source_name} tells of by `get_state` is not saved. Received: {why}. Expected: "
                "numbers, strings, arrays, and lists and dictionaries (with strings for keys) of these. Have it return "
                "such, or rename the method if it is not about the order of the batches.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _cannot_be_kept(self) -> str | None:
        try:
            kind = unsavable(self._source.get_state())
        except Exception as error:  # a method of the same name that does something else, as one with arguments
            return f"{type(error).__name__}: {error}"
        return None if kind is None else f"a value of type {kind}"

    def order(self, drawn: int | None) -> Json:
        """What decides which batches come next.

        Args:
          drawn: how many batches of this pass have been trained on; `None` if a new pass comes next.
        """
        if self._keeps_state and (drawn is None or self._is_read_in_turn):
            own: Any = copy.deepcopy(self._source.get_state())
        else:
            own = self._own_at_begin
        before: Json = {}
        if drawn is not None:
            before = self._ahead.before(drawn)
            own = before.pop(OWN, own)
        return {**self.hooks.order(), "random_state": self.state, "before": before, OWN: own}

    def restore(self, order: Json, within_epoch: bool) -> None:
        """Puts back what `order` has returned; the beginning of an epoch that goes on is left to Keras."""
        self._pending = dict(order["before"])
        if order[OWN] is None:
            self.hooks.repeat(order, within_epoch)
            return
        self.hooks.pass_over(order, within_epoch)
        self._source.set_state(copy.deepcopy(order[OWN]))
        if within_epoch:
            self._pending[OWN] = order[OWN]

    def begin_pass(self, first: int = 0, state: Any = None) -> None:
        """Begins a pass at batch `first` of its order, from 0: the order that `state` stands for, else a new one."""
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
        """How many batches this pass has; `None` without an end."""
        return None if self._source.num_batches is None else max(self._source.num_batches - self._first, 0)

    def __getitem__(self, index: int) -> Any:
        number = self._first + index
        if not self._follows or not self._is_read_in_turn:
            return self._read(number)
        before = self._states()
        batch = self._read(number)
        self._ahead.note(number, before, self._states())
        return batch

    def on_epoch_begin(self) -> None:
        """Hands the call on, and counts it."""
        present, pending = global_states(), self._pending
        self.hooks.call(BEGIN)
        if pending:
            self._pending = {}
            if OWN in pending:  # that call has been made before
                set_global_states(present)
                self._source.set_state(copy.deepcopy(pending[OWN]))
            set_global_states({name: unpacked(state) for name, state in pending.items() if name != OWN})
        if self._keeps_state and self._follows:
            self._own_at_begin = copy.deepcopy(self._source.get_state())

    def on_epoch_end(self) -> None:
        """Hands the call on, and counts it."""
        self.hooks.call(END)

    def _read(self, number: int) -> Any:
        return self._source[number if self._order is None else self._order[number]]

    def _states(self) -> Json:
        if not self._keeps_state:
            return global_states()
        self._last_own = copied(self._source.get_state(), self._last_own)
        return {**global_states(), OWN: self._last_own}
