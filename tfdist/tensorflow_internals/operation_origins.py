"""Finds the line of a program, or the library, that made an operation of a graph."""

import functools
import os
from importlib.util import find_spec
from typing import Any

import tensorflow as tf

_KERAS_FUNCTIONS = ("ops", "backend", "random", "utils")  # which programs call, too


@functools.cache
def _folder(library: str) -> str:
    spec = find_spec(library)
    return os.path.dirname(os.path.realpath(spec.origin)) + os.sep if spec and spec.origin else os.devnull


def user_line(tensor: tf.Tensor) -> str:
    """Returns the file, line and function of the user's statement that computed a tensor of a graph."""
    folders = tuple(map(_folder, ("tensorflow", "keras", "tfdist", "tfdist.strategies")))
    for frame in reversed(list(tensor.op.traceback)):
        path, line, function = tuple(frame)[:3]
        if not path.startswith("<") and not os.path.realpath(path).startswith(folders):
            return f"{path}:{line}, in {function}"
    return f"the operation {tensor.op.name!r}"


def is_of_keras(tensor: tf.Tensor) -> bool:
    """Whether a layer, a loss or another class of Keras has computed a tensor of a graph, and not the user's code."""
    keras = _folder("keras")
    functions = tuple(os.path.join(keras, "src", name, "") for name in _KERAS_FUNCTIONS)
    for frame in reversed(list(tensor.op.traceback)):
        path = os.path.realpath(tuple(frame)[0])
        if not path.startswith((_folder("tensorflow"), *functions)):
            return path.startswith(keras)
    return False


def describe(value: Any) -> str:
    """Returns where `value` was computed, as far as that is known."""
    return user_line(value) if hasattr(value, "op") else repr(value)


def is_symbolic(value: Any) -> bool:
    """Whether `value` is a dense tensor of a graph, whose origin can be followed."""
    return isinstance(value, tf.Tensor) and hasattr(value, "graph") and not hasattr(value, "numpy")
