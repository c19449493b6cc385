"""Copies of variables in the host's memory, into arrays that are used again."""

from typing import Any

import numpy as np


class HostCopies:
    """Copies of variables, each with a name.

    Memory that the process touches for the first time costs several times the copy itself. So an array is written
    again when the same variable is copied the next time; whoever uses the copies must have done with them by then.

    >>> import tensorflow as tf
    >>> variable, copies = tf.Variable([1.0, 2.0]), HostCopies()
    >>> first = copies.of("kernel", variable)
    >>> changed = variable.assign_add([1.0, 1.0])
    >>> first
    array([1., 2.], dtype=float32)
    >>> copies.of("kernel", variable) is first, first
    (True, array([2., 3.], dtype=float32))
    """

    def __init__(self) -> None:
        """Nothing is held at first."""
        self._arrays: dict[str, np.ndarray] = {}

    def of(self, name: str, variable: Any) -> np.ndarray:
        """Copies `variable`, a `tf.Variable`, and returns the copy, an array of its shape and dtype.

        Args:
          name: of the variable; the array of this name is written again if it has the shape and dtype.
          variable: what is copied; it is not changed.
        """
        value = _view(variable)
        known = self._arrays.get(name)
        if known is not None and (known.shape, known.dtype) == (value.shape, value.dtype):
            np.copyto(known, value)
        else:
            self._arrays[name] = known = np.array(value)
        return known


def _view(variable: Any) -> np.ndarray:
    """The value: in the variable's own memory where NumPy can look into it, from other devices (GPU, TPU) a copy."""
    value = variable.read_value()
    if "CPU" in value.device:
        try:
            return np.asarray(memoryview(value))
        except (ValueError, TypeError, BufferError):  # bfloat16 and float8 are no formats of buffers
            pass
    return np.asarray(value.numpy())
