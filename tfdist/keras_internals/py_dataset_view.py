"""A `keras.utils.PyDataset` whose order is known, and which can begin in the middle."""

import random
from typing import Any

import keras

RandomState = list[Any]


class PyDatasetView(keras.utils.PyDataset):
    """Another PyDataset's batches, pass by pass, in an order that it draws itself.

    Keras shuffles the numbers of the batches with Python's `random`, in a thread, when the first batch is asked for;
    the view draws the same in the caller's thread, and keeps the state that it began with.

    Attributes:
      hooks: how often `on_epoch_begin` and `on_epoch_end` have been called.
      state: the state of `random` before the order of this pass was drawn, as `random.getstate()` has it, with lists
        for tuples; `None` if the pass is not shuffled.
    """

    def __init__(self, source: Any, shuffle: bool) -> None:
        super().__init__(source.workers, source.use_multiprocessing, source.max_queue_size)
        self.hooks = [0, 0]
        self.state: RandomState | None = None
        self._source = source
        self._shuffle = shuffle and source.num_batches is not None
        self._order: list[int] | None = None
        self._first = 0

    def begin_pass(self, first: int = 0, state: RandomState | None = None) -> None:
        """Begins a pass at batch `first` of its order, from 0: the order that `state` stands for, else a new one."""
        self._first = first
        self.state = self._order = None
        if self._shuffle:
            generator: Any = random
            if state is not None:
                generator = random.Random()
                generator.setstate(_tuples(state))
            self.state = _lists(generator.getstate())
            self._order = list(range(self._source.num_batches))
            generator.shuffle(self._order)

    def replay_hooks(self, begins: int, ends: int) -> None:
        """Calls the hooks, in turn, until they have been called that often."""
        while self.hooks[1] < ends:
            if self.hooks[0] < begins and self.hooks[0] <= self.hooks[1]:
                self.on_epoch_begin()
            self.on_epoch_end()
        while self.hooks[0] < begins:
            self.on_epoch_begin()

    @property
    def num_batches(self) -> int | None:
        """How many batches this pass has; `None` without an end."""
        return None if self._source.num_batches is None else max(self._source.num_batches - self._first, 0)

    def __getitem__(self, index: int) -> Any:
        number = self._first + index
        return self._source[number if self._order is None else self._order[number]]

    def on_epoch_begin(self) -> None:
        """Hands the call on, and counts it."""
        self.hooks[0] += 1
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Hands the call on, and counts it."""
        self.hooks[1] += 1
        self._source.on_epoch_end()


def _lists(state: Any) -> Any:
    return [_lists(part) for part in state] if isinstance(state, tuple) else state


def _tuples(state: Any) -> Any:
    return tuple(_tuples(part) for part in state) if isinstance(state, list) else state
