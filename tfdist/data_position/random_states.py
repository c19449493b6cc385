"""The states of random generators: the global ones of NumPy and Python, and those that a program creates."""

import random
from typing import Any

import numpy as np

State = Any


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
