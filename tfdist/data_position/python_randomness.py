"""The states of Python's and NumPy's random generators, and the generators that a tf.data pipeline's Python code uses.

Such code is given to `from_generator`, `py_function` and `numpy_function`.
"""

import collections
import contextlib
import functools
import inspect
import random
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.utils.names_in_code import names_in_code

State = Any
States = dict[str, Any]

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)
_LIBRARIES = ("tensorflow.", "keras.", "numpy.")
_DEEPEST = 12
_LONGEST = 100
_MOST_VALUES = 10_000  # a pipeline may hold models and data frames


def global_states() -> dict[str, State]:
    """Returns the states of `numpy.random` and `random`.

    >>> before = global_states()
    >>> states_equal(before, global_states())
    True
    >>> numbers = np.random.random(), random.random()
    >>> set_global_states(before)
    >>> (np.random.random(), random.random()) == numbers
    True
    """
    return {"numpy": np.random.get_state(legacy=False), "python": random.getstate()}


def set_global_states(states: dict[str, State]) -> None:
    """Restores the given states."""
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "python" in states:
        random.setstate(states["python"])


def state_of(generator: Any) -> State:
    """Returns the state of a generator of NumPy or Python."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)


def set_state_of(generator: Any, state: State) -> None:
    """Restores a state that `state_of` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def states_equal(one: State, other: State) -> bool:
    """Whether two states, or structures of states, are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(states_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(states_equal(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


class PythonRandomness:
    """The generators that a pipeline's Python code may draw from, and their states when the present pass began.

    A pass is resumed by drawing it again from its beginning, so these are the states to save: those of the global
    generators of NumPy and Python, and of the generators that the code holds.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        """Finds the generators that `functions`, the pipeline's Python functions, hold."""
        self._own = find_generators(functions)
        self._at_begin: States = self._present()

    def begin_pass(self) -> None:
        """Records the present states. Call this before an iterator is created."""
        self._at_begin = self._present()

    def states(self, *, within_pass: bool) -> States:
        """Returns the states when the pass began, or the present ones."""
        return self._at_begin if within_pass else self._present()

    def restore(self, states: States) -> None:
        """Restores the states of the code's own generators, not of the global ones."""
        if len(states["own"]) != len(self._own):
            warnings.warn(
                "The random generators in this data's Python code differ from those before the restart; they are not "
                f"restored. Received: {len(self._own)} of them. Expected: {len(states['own'])}. Some samples of this "
                "epoch may be seen twice and others not at all. Give `fit` the same data, created by the same code.",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        for generator, state in zip(self._own, states["own"], strict=True):
            set_state_of(generator, state)

    @contextmanager
    def replay_pass(self, states: States) -> Iterator[None]:
        """A context in which this thread draws a pass again that had begun with `states`.

        Generators that were drawn from keep their new states, all others get those from before the context.
        """
        before, own_states = global_states(), [state_of(generator) for generator in self._own]
        set_global_states(states)
        self.restore(states)
        began = self._at_begin = self._present()
        yield
        after = self._present()
        set_global_states({name: state for name, state in before.items() if states_equal(began[name], after[name])})
        for generator, state, *both in zip(self._own, own_states, began["own"], after["own"], strict=True):
            if states_equal(*both):
                set_state_of(generator, state)

    def _present(self) -> States:
        return {**global_states(), "own": [state_of(generator) for generator in self._own]}


def find_generators(functions: Iterable[Any]) -> list[Any]:
    """Returns the generators that Python functions hold or name, in the order of discovery, without the global ones.

    Searches closures, defaults, bound objects and the names of their modules, also of the functions that these call;
    not what is looked up in other modules, nor what models and TensorFlow's objects hold. Generators without a state,
    such as `random.SystemRandom`, are left out.

    >>> mine = np.random.default_rng(0)
    >>> def numbers():
    ...     yield from mine.permutation(3)
    >>> find_generators([numbers]) == [mine]
    True
    """
    global_ones = {id(np.random.shuffle.__self__), id(random.shuffle.__self__)}  # type: ignore[attr-defined]
    generators: list[Any] = []
    seen: set[int] = set()
    waiting = collections.deque((function, 0) for function in functions)
    while waiting and len(seen) < _MOST_VALUES:
        value, depth = waiting.popleft()
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        with contextlib.suppress(Exception):  # foreign code: skip what cannot be inspected
            if isinstance(value, _KINDS):
                state_of(value)
                generators += [] if id(value) in global_ones else [value]
            else:
                waiting += [(part, depth + 1) for part in _parts(value)]
    return generators


def _parts(value: Any) -> list[Any]:
    """Returns the values that `value` refers to."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = [] if (value.__module__ or "").startswith(_LIBRARIES) else names_in_code(value.__code__)
        return [*cells, *(value.__defaults__ or ()), *(value.__globals__.get(name) for name in names)]
    if isinstance(value, list | tuple | dict):
        parts = list(value.values() if isinstance(value, dict) else value)
        return parts if len(parts) <= _LONGEST else []
    # These hold no generator of the data, and much else; TensorFlow's wrappers of Python functions do.
    skipped = (types.ModuleType, type, keras.layers.Layer, keras.optimizers.Optimizer, tf.Module, tf.Graph, tf.Tensor)
    if isinstance(value, skipped) or inspect.getattr_static(value, "element_spec", None) is not None:
        return []
    # Without running code of the object: a `__getattr__` may do anything.
    return list(object.__getattribute__(value, "__dict__").values())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
