"""The states that reading batches ahead of training changes, as they were before each batch."""

import collections
import contextlib
import copy
from typing import Any

from tfdist.data_position.python_randomness import states_equal
from tfdist.utils.json_state import to_text

States = dict[str, Any]

OWN = "own"  # the state that the data returns by `get_state`; other states are of the global generators
# Keras lets tf.data decide how many batches are read ahead; it begins with a few, and doubles the number on demand.
_MOST_ENTRIES = 512


class ReadAhead:
    """The states that reading a batch changed, as they were before.

    Unchanged states are not kept. A random state takes 3 KB of text, a state of the data what differs from its
    predecessor. Another thread may draw from a global generator while a batch is read. So a change counts as the data's
    if it came with the first batch, for which training waits, or if nobody draws from the generator between batches.

    >>> ahead = ReadAhead()
    >>> for number in range(3):
    ...     ahead.record(number, {"own": {"read": number}}, {"own": {"read": number + 1}})
    >>> ahead.before(1), ahead.before(3)
    ({'own': {'read': 1}}, {'own': {'read': 3}})
    """

    def __init__(self) -> None:
        self._entries: collections.deque[tuple[int, str, Any]] = collections.deque()
        self._after: States = {}  # changed states, after the last batch
        self._last: States = {}
        self._changed_by_first: set[str] = set()
        self._changed_by_others: set[str] = set()
        self._known_from = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Begins a new pass."""
        self._entries.clear()
        self._after, self._last, self._known_from = {}, {}, 0
        self._changed_by_first = set()

    def record(self, number: int, before: States, after: States) -> None:
        """Records the states that reading batch `number` has changed. Called by the thread that reads."""
        for name, state in before.items():
            if self._last and name != OWN and not _equal(name, self._last[name], state):
                self._changed_by_others.add(name)
            if _equal(name, state, after[name]):
                continue
            if not self._last:
                self._changed_by_first.add(name)
            if name == OWN or name in self._changed_by_first or name not in self._changed_by_others:
                self._keep(number, name, state if name == OWN else to_text(state))
                self._after[name] = after[name]
        self._last = after

    def before(self, number: int) -> States:
        """Returns the states before batch `number` that reading has changed; drops those of earlier batches.

        A state is left out if the present one serves to read all later batches, or if it is not known any more.
        """
        with contextlib.suppress(IndexError):
            while self._entries[0][0] < number:
                self._entries.popleft()
        if number < self._known_from:
            return {}
        after, entries = dict(self._after), list(self._entries)
        states = {name: to_text(state) if name != OWN else state for name, state in after.items()}
        # What others have drawn since is unknown, but the present state includes it: the data has drawn no more.
        states = {name: state for name, state in states.items() if name == OWN or name not in self._changed_by_others}
        for _, name, state in reversed([entry for entry in entries if entry[0] >= number]):
            states[name] = state
        return states

    def _keep(self, number: int, name: str, state: Any) -> None:
        self._entries.append((number, name, state))
        if len(self._entries) > _MOST_ENTRIES:
            with contextlib.suppress(IndexError):
                self._known_from = self._entries.popleft()[0] + 1


def copy_changes(state: Any, known: Any) -> Any:
    """Copies `state`, but reuses the equal parts of `known`, an earlier copy.

    >>> import numpy as np
    >>> known = {"indexes": np.arange(3), "drawn": 0}
    >>> copy_changes({"indexes": np.arange(3), "drawn": 1}, known)["indexes"] is known["indexes"]
    True
    """
    if type(state) is dict and type(known) is dict:
        return {key: copy_changes(value, known.get(key)) for key, value in state.items()}
    with contextlib.suppress(Exception):  # values that cannot be compared
        if type(state) is type(known) and states_equal(state, known):
            return known
    return copy.deepcopy(state)


def _equal(name: str, one: Any, other: Any) -> bool:
    with contextlib.suppress(ValueError):  # of tensors
        return bool(one == other) if name == "python" else one is other or states_equal(one, other)
    return False
