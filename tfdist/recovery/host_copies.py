"""Copies variables to host memory, into arrays that are reused for the next copy."""

from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.placed_strategy import SplitValue


class HostCopies:
    """Copies of variables by name. A copy is requested at once and made later, for example by another thread.

    A copy has the value at the time of the request. TensorFlow never writes to memory that was read: an update of a
    variable that is not copied yet takes new memory.

    Memory that the process touches for the first time costs several times the copy itself, so the array of a variable
    is reused for its next copy. Finish using the copies before requesting the next ones.

    >>> import tensorflow as tf
    >>> variable, copies = tf.Variable([1.0, 2.0]), HostCopies()
    >>> first = copies.request("kernel", variable)
    >>> changed = variable.assign_add([1.0, 1.0])
    >>> copies.finish()
    >>> first
    array([1., 2.], dtype=float32)
    >>> again = copies.request("kernel", variable)
    >>> copies.finish()
    >>> again is first, first
    (True, array([2., 3.], dtype=float32))
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._requested: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def request(self, name: str, variable: Any) -> np.ndarray:
        """Requests a copy of `variable`.

        The array of this name is reused if it has the same shape and dtype.

        Returns:
            An array of its shape and dtype that has its present value after `finish`.
        """
        is_split = isinstance(variable, SplitValue)
        parts = variable.parts() if is_split else [(..., ..., variable)]
        views = [(index, _view(part)[place]) for index, place, part in parts]
        shape, dtype = tuple(variable.shape) if is_split else views[0][1].shape, views[0][1].dtype
        array = self._arrays.get(name)
        if array is None or (array.shape, array.dtype) != (shape, dtype):
            array = self._arrays[name] = np.empty(shape, dtype)
        self._requested.extend((array[index], view) for index, view in views)
        return array

    def finish(self) -> None:
        """Makes the requested copies, in order, and releases the memory of the variables."""
        while self._requested:
            np.copyto(*self._requested.popleft())


def _view(variable: Any) -> np.ndarray:
    """Returns the value: a view of the variable's memory if NumPy can read it, a copy from other devices (GPU, TPU)."""
    if "/job:localhost/" in variable.device and "CPU" in variable.device and hasattr(variable, "handle"):
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)  # a third of the time
    else:  # on a server or a TPU, the variable itself knows how it is read
        value = variable.read_value()
    if "CPU" in value.device:
        try:
            return np.asarray(memoryview(value))
        except (ValueError, TypeError, BufferError):  # buffers have no format for bfloat16 and float8
            pass
    return np.asarray(value.numpy())
