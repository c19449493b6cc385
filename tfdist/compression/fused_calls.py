"""Computes an encoding or decoding by XLA: one or two passes over the values in place of one for each operation."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import tensorflow as tf

from tfdist.tensorflow_internals.xla_functions import compiles_on_cpus

Result = TypeVar("Result")

# Smaller tensors stay in a core's cache, and compiling a function for a shape takes 0.1 to 0.4 s.
FUSED_VALUES = 1 << 16


def fused(function: Callable[..., Result], *tensors: tf.Tensor) -> Result:
    """Returns `function(*tensors)`, computed by XLA on CPUs if the tensors are large.

    Args:
        function: A pure function of tensors without random numbers. XLA compiles it once for each combination of
            shapes, so equal functions must be equal objects or methods of equal objects.
        tensors: The arguments. If a shape is unknown, TensorFlow computes the function.

    >>> import tensorflow as tf
    >>> int(tf.reduce_sum(fused(tf.abs, tf.fill([FUSED_VALUES], -1.0))))
    65536
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    if None in sizes or max(sizes) < FUSED_VALUES or not compiles_on_cpus():
        return function(*tensors)
    # Equal compressors share a compiled function: bound methods would be equal only for the same object.
    method, owner = getattr(function, "__func__", function), getattr(function, "__self__", None)
    if not isinstance(owner, Hashable):  # a compressor of the user, for instance a dataclass
        return function(*tensors)
    return _compiled(method, owner, *(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors))(*tensors)


@functools.lru_cache(maxsize=1024)
def _compiled(function: Callable[..., Any], owner: Any, *specs: tf.TensorSpec) -> Any:
    if owner is not None:
        function = functools.partial(function, owner)
    with tf.init_scope(), tf.device(None):  # Each call runs on the device of its caller.
        return tf.function(function, jit_compile=True, autograph=False).get_concrete_function(*specs)
