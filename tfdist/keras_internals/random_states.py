"""Random generators that data draws from: the global ones of NumPy and Python, and those that a program has made."""

import base64
import collections
import contextlib
import functools
import inspect
import json
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

State = Any

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)
_LIBRARIES = ("tensorflow.", "keras.", "numpy.")
_DEEPEST = 12
_LONGEST = 100
_MOST_VALUES = 10_000  # a pipeline may hold whole models and data frames


def global_states() -> dict[str, State]:
    """The states of `numpy.random` and of `random`.

    >>> before = global_states()
    >>> same(before, global_states())
    True
    >>> numbers = np.random.random(), random.random()
    >>> set_global_states(before)
    >>> (np.random.random(), random.random()) == numbers
    True
    """
    return {"numpy": np.random.get_state(legacy=False), "python": random.getstate()}


def set_global_states(states: dict[str, State]) -> None:
    """Puts back those states that are given."""
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "python" in states:
        random.setstate(states["python"])


def packed(state: State) -> str:
    """A state of `global_states` as a short text: 3 KB in place of the 20 KB that Python's takes.

    >>> states = global_states()
    >>> [same(unpacked(packed(states[name])), states[name]) for name in ("numpy", "python")]
    [True, True]
    """

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            long = len(value) > _LONGEST  # the words of the Mersenne twister, of 32 bits each, and where it is
            return {"words": _text(np.array(value, "<u4"))} if long else {"tuple": [plain(item) for item in value]}
        if isinstance(value, np.ndarray):
            return {"array": _text(value), "dtype": value.dtype.str}
        if isinstance(value, dict):
            return {"dict": {key: plain(item) for key, item in value.items()}}
        return value.item() if isinstance(value, np.generic) else value

    return json.dumps(plain(state))


def unpacked(text: str) -> State:
    """The state that `packed` was given."""

    def state(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tuple" in value:
            return tuple(state(item) for item in value["tuple"])
        if "words" in value:
            return tuple(np.frombuffer(base64.b64decode(value["words"]), "<u4").tolist())
        if "array" in value:
            return np.frombuffer(base64.b64decode(value["array"]), value["dtype"]).copy()
        return {key: state(item) for key, item in value["dict"].items()}

    return state(json.loads(text))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def state_of(generator: Any) -> State:
    """The state of a generator that `generators_in` has found."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False)


def set_state_of(generator: Any, state: State) -> None:
    """Puts back what `state_of` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def same(one: State, other: State) -> bool:
    """Whether two states, or structures of them, are equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def generators_in(functions: Iterable[Any]) -> list[Any]:
    """The generators that Python functions hold or name, in the order in which they are found; global ones left out.

    Looked at are closures, defaults, bound objects and the names of their modules, for the functions that these call,
    too; not what is looked up in other modules, nor what models and TensorFlow's objects hold. Those whose state nobody
    can have, as `random.SystemRandom`, are none.

    >>> mine = np.random.default_rng(0)
    >>> def numbers():
    ...     yield from mine.permutation(3)
    >>> generators_in([numbers]) == [mine]
    True
    """
    ours = {id(np.random.shuffle.__self__), id(random.shuffle.__self__)}  # type: ignore[attr-defined]
    found: list[Any] = []
    seen: set[int] = set()
    waiting = collections.deque((function, 0) for function in functions)
    while waiting and len(seen) < _MOST_VALUES:
        value, depth = waiting.popleft()
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        with contextlib.suppress(Exception):  # of foreign code: what cannot be looked at holds nothing
            if isinstance(value, _KINDS):
                state_of(value)
                found += [] if id(value) in ours else [value]
            else:
                waiting += [(part, depth + 1) for part in _parts(value)]
    return found


def _parts(value: Any) -> list[Any]:
    """What is looked at next."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = [] if (value.__module__ or "").startswith(_LIBRARIES) else _names(value.__code__)
        return [*cells, *(value.__defaults__ or ()), *(value.__globals__.get(name) for name in names)]
    if isinstance(value, list | tuple | dict):
        parts = list(value.values() if isinstance(value, dict) else value)
        return parts if len(parts) <= _LONGEST else []
    # These hold no generator of the data's, and much else; TensorFlow's wrappers of Python functions do.
    let_be = (types.ModuleType, type, keras.layers.Layer, keras.optimizers.Optimizer, tf.Module, tf.Graph, tf.Tensor)
    if isinstance(value, let_be) or inspect.getattr_static(value, "element_spec", None) is not None:
        return []
    # Looked up without running code of the object's: a `__getattr__` may do anything.
    return list(object.__getattribute__(value, "__dict__").values())


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function and those within it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
