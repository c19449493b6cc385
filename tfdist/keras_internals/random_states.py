"""The states of random generators: the global ones of NumPy and Python, and those that a program has made."""

import base64
import json
import random
from typing import Any

import numpy as np

State = Any

_LONGEST = 100  # of a tuple that is written item by item


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
