"""Copies what Python functions return to TensorFlow, whose kernels would otherwise write into the user's arrays.

`from_generator`, Keras' adapters of generators and `PyDataset`, `numpy_function` and `py_function` pass an array of
NumPy on without a copy if it is aligned to 64 bytes, as every memory-mapped `.npy` file is. TensorFlow marks its memory
as borrowed, so that no kernel reuses it for an output. A slice of it has no such mark: where rows are divided among
replicas or micro-batches, kernels write into the array, or into the file.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.utils.reused_memory import ReusedMemory

_Registry = private("tensorflow.python.ops.script_ops:FuncRegistry", "calls the Python functions of a graph")

_MEMORY = ReusedMemory()
_COPIED_TYPES = frozenset(
    [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.bool, tf.complex64, tf.complex128]
    + [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64]
)


@patch
def copy_results_of_python_functions() -> None:
    """Makes TensorFlow receive copies of the results of all Python functions. More calls have no effect."""
    stock = _Registry.__call__

    @replace(_Registry, "__call__")
    def call(self: Any, token: str, device: str | None, args: Any) -> Any:
        results = stock(self, token, device, args)
        return [_copied(result) for result in results] if isinstance(results, list) else _copied(results)


def _copied(result: Any) -> Any:
    """Returns a copy of an array or a tensor with rows; anything else as it is, such as strings, which are copied."""
    if not getattr(result, "ndim", 0):
        return result
    if isinstance(result, np.ndarray) and not result.dtype.hasobject and result.dtype.kind not in "SU":
        copy = _MEMORY.empty(result.shape, result.dtype)
        copy[...] = result
        return copy
    if isinstance(result, tf.Tensor) and result.dtype in _COPIED_TYPES and "CPU" in result.device:
        # Of `py_function`. A tensor may use the memory of an array, as that of `tf.expand_dims(array, 0)` does.
        with tf.device(result.device):
            return tf.raw_ops.DeepCopy(x=result)
    return result
