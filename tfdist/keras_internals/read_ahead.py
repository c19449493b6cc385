"""What reading batches ahead of training changes, kept as it was before each of them."""

import collections
import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.keras_internals.random_states import packed, same

States = dict[str, Any]

OWN = "own"  # the state that the data tells of; others are of the global generators
# Keras leaves to tf.data how many batches are read ahead. It begins with a few, and doubles them where they run out.
_MOST_ENTRIES = 512


class ReadAhead:
    """The states that reading a batch changed, as they were before.

    Only these are kept: a random state as a text of 3 KB, and of a state of the data's own what differs from the one
    kept before it. Another thread may draw from a global generator while a batch is read. So a change counts as the
    data's if it came with the first batch, for which training waits, or if nobody draws from it between batches.

    >>> ahead = ReadAhead()
    >>> for number in range(3):
    ...     ahead.note(number, {"own": {"read": number}}, {"own": {"read": number + 1}})
    >>> ahead.before(1), ahead.before(3)
    ({'own': {'read': 1}}, {'own': {'read': 3}})
    """

    def __init__(self) -> None:
        self._entries: collections.deque[tuple[int, str, Any]] = collections.deque()
        self._after: States = {}  # what changed, as the last batch left it
        self._last: States = {}
        self._from_the_first: set[str] = set()
        self._others: set[str] = set()  # what somebody else changes, too
        self._known_from = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Begins a new pass."""
        self._entries.clear()
        self._after, self._last, self._known_from = {}, {}, 0
        self._from_the_first = set()

    def note(self, number: int, before: States, after: States) -> None:
        """Keeps what reading batch `number` has changed; called by the thread that reads."""
        for name, state in before.items():
            if self._last and name != OWN and not _equal(name, self._last[name], state):
                self._others.add(name)
            if _equal(name, state, after[name]):
                continue
            if not self._last:
                self._from_the_first.add(name)
            if name == OWN or name in self._from_the_first or name not in self._others:
                self._keep(number, name, state if name == OWN else packed(state))
                self._after[name] = after[name]
        self._last = after

    def before(self, number: int) -> States:
        """The states before batch `number`, of what reading has changed; earlier batches are trained on, and dropped.

        A state is left out if all that follows can be read again with the present one, or if it is not known any more.
        """
        with contextlib.suppress(IndexError):
            while self._entries[0][0] < number:
                self._entries.popleft()
        if number < self._known_from:
            return {}
        after, entries = dict(self._after), list(self._entries)
        states = {name: packed(state) if name != OWN else state for name, state in after.items()}
        # Nobody can say what the others have drawn since, but the present state can: the data has drawn no more.
        states = {name: state for name, state in states.items() if name == OWN or name not in self._others}
        for _, name, state in reversed([entry for entry in entries if entry[0] >= number]):
            states[name] = state
        return states

    def _keep(self, number: int, name: str, state: Any) -> None:
        self._entries.append((number, name, state))
        if len(self._entries) > _MOST_ENTRIES:
            with contextlib.suppress(IndexError):
                self._known_from = self._entries.popleft()[0] + 1


def copied(state: Any, known: Any) -> Any:
    """A copy of `state`, with those parts of `known`, another copy, that are equal.

    >>> known = {"indexes": np.arange(3), "drawn": 0}
    >>> copied({"indexes": np.arange(3), "drawn": 1}, known)["indexes"] is known["indexes"]
    True
    """
    if type(state) is dict and type(known) is dict:
        return {key: copied(value, known.get(key)) for key, value in state.items()}
    with contextlib.suppress(Exception):  # of what cannot be compared
        if type(state) is type(known) and same(state, known):
            return known
    return copy.deepcopy(state)


def unsavable(state: Any) -> str | None:
    """What in `state` no checkpoint can hold; `None` if it can hold all.

    >>> unsavable({"indexes": [np.arange(3), 1.5, None]}), unsavable({"seen": {1, 2}})
    (None, 'set')
    """
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return next((kind for kind in map(unsavable, state) if kind is not None), None)
    if state is None or isinstance(state, bool | str) or type(state) in (int, float) or hasattr(state, "numpy"):
        return None
    is_numeric = isinstance(state, np.ndarray | np.generic) and state.dtype.kind in "biuf"
    return None if is_numeric else type(state).__name__


def _equal(name: str, one: Any, other: Any) -> bool:
    with contextlib.suppress(ValueError):  # of tensors
        return bool(one == other) if name == "python" else one is other or same(one, other)
    return False
