"""Copies of variables in the host's memory, into arrays that are used again."""

from collections import deque
from typing import Any

import numpy as np


class HostCopies:
    """Copies of variables, each with a name: asked for at once, made later, as by another thread during the next step.

    They hold what the variables held when they were asked for. What TensorFlow has read is never written to: where an
    update meets a variable that is not copied yet, it takes new memory for it.

    Memory that the process touches for the first time costs several times the copy itself. So an array is written
    again when the same variable is copied the next time; whoever uses the copies must have done with them by then.

    >>> import tensorflow as tf
    >>> variable, copies = tf.Variable([1.0, 2.0]), HostCopies()
    >>> first = copies.of("kernel", variable)
    >>> changed = variable.assign_add([1.0, 1.0])
    >>> copies.finish()
    >>> first
    array([1., 2.], dtype=float32)
    >>> again = copies.of("kernel", variable)
    >>> copies.finish()
    >>> again is first, first
    (True, array([2., 3.], dtype=float32))
    """

    def __init__(self) -> None:
        """Nothing is held at first."""
        self._arrays: dict[str, np.ndarray] = {}
        self._left: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def of(self, name: str, variable: Any) -> np.ndarray:
        """Asks for a copy of `variable`, a `tf.Variable`.

        Args:
          name: of the variable; the array of this name is written again if it has the shape and dtype.
          variable: what is copied; it is not changed.

        Returns:
          An array of its shape and dtype, which holds its value after `finish`.
        """
        value = _view(variable)
        array = self._arrays.get(name)
        if array is None or (array.shape, array.dtype) != (value.shape, value.dtype):
            array = self._arrays[name] = np.empty(value.shape, value.dtype)
        self._left.append((array, value))
        return array

    def finish(self) -> None:
        """Makes the copies that were asked for, in this order, and lets go of what was read."""
        while self._left:
            np.copyto(*self._left.popleft())


def _view(variable: Any) -> np.ndarray:
    """The value: in the variable's own memory where NumPy can look into it, from other devices (GPU, TPU) a copy."""
    value = variable.read_value()
    if "CPU" in value.device:
        try:
            return np.asarray(memoryview(value))
        except (ValueError, TypeError, BufferError):  # bfloat16 and float8 are no formats of buffers
            pass
    return np.asarray(value.numpy())
