"""Finds the random generators that Python functions draw from."""

import collections
import contextlib
import functools
import inspect
import random
import types
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.random_states import state_of

_KINDS = (np.random.Generator, np.random.RandomState, random.Random)
_LIBRARIES = ("tensorflow.", "keras.", "numpy.")
_DEEPEST = 12
_LONGEST = 100
_MOST_VALUES = 10_000  # a pipeline may hold whole models and data frames


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
