"""Compiles parts of a replica's step by XLA, which cannot compile collectives on CPUs, and so not the whole step."""

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.sample_functions import LOOPS, PLAIN_CALLS, called_graph

_random = private(
    "tensorflow.python.ops:random_ops_util",
    "selects the algorithm of random numbers by an operation for which XLA has no kernel on CPUs",
)
_operations = private("tensorflow.python.ops:gen_stateless_random_ops_v2", "makes floats of other bits than XLA does")
# The bits of the mantissa, those of 1, and an integer type of the same size.
_FLOATS = {
    tf.float32: (0x7FFFFF, 0x3F800000, tf.uint32),
    tf.float16: (0x3FF, 0x3C00, tf.uint16),
    tf.bfloat16: (0x7F, 0x3F80, tf.uint16),
}
_is_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar("tfdist_is_compiling", default=False)


class CannotCompileError(Exception):
    """Raised while a function is being traced for XLA, by what XLA cannot compile."""


def is_compiling() -> bool:
    """Whether a function is being traced that XLA will compile."""
    return _is_compiling.get()


def call_compiled(function: Callable[..., Sequence[tf.Tensor]], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor] | None:
    """Calls `function(*tensors)` in a graph as one computation of XLA, on the device of this replica.

    Gradient tapes differentiate it, by a second computation, to which the first one passes what it needs.

    Args:
        function: Returns a list of tensors. It may read variables of this replica and assign them.
        tensors: Its arguments, dense tensors of numbers.

    Returns:
        What `function` returned; `None` if nothing was called, because it contains a collective or a loop. The values
        of a loop's turns, a list of tensors, cannot leave a computation of XLA.
    """

    def traced(*arguments: tf.Tensor) -> list[tf.Tensor]:
        token = _is_compiling.set(True)
        try:
            return list(function(*arguments))
        finally:
            _is_compiling.reset(token)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    # A call of the function itself would count as retracing, of which TensorFlow warns.
    try:
        concrete = tf.function(traced, jit_compile=True, autograph=False).get_concrete_function(*specs)
    except CannotCompileError:
        return None
    return None if _has_loop(concrete.graph) else list(concrete(*tensors))


def _has_loop(graph: Any) -> bool:
    for operation in graph.get_operations():
        if operation.type in LOOPS:
            return True
        called = called_graph(graph, operation.get_attr("f").name) if operation.type in PLAIN_CALLS else None
        if called is not None and _has_loop(called):
            return True
    return False


def patch_random_numbers() -> None:
    """Makes functions that XLA will compile draw the numbers that TensorFlow draws on CPUs and GPUs without XLA.

    TensorFlow selects Philox there, XLA another algorithm. And XLA makes floats of other bits of the same integers:
    those of uniform numbers (dropout) are made here, so that they are the same. Normal numbers differ.
    """
    select, draw_uniform = _random.get_key_counter_alg, _operations.stateless_random_uniform_v2

    @functools.wraps(select)
    def select_philox(seed: Any, alg: Any) -> Any:
        is_automatic = alg is None or _random.convert_alg_to_int(alg) == tf.random.Algorithm.AUTO_SELECT.value
        return select(seed, "philox" if is_automatic and is_compiling() else alg)

    @functools.wraps(draw_uniform)
    def draw_equal(shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None) -> Any:
        layout = _FLOATS.get(tf.as_dtype(dtype))
        if layout is None or not is_compiling():
            return draw_uniform(shape, key=key, counter=counter, alg=alg, dtype=dtype, name=name)
        mantissa, one, integer = layout
        bits = _operations.stateless_random_uniform_full_int_v2(shape, key, counter, alg, dtype=tf.uint32)
        mantissas = tf.cast(bits & tf.constant(mantissa, tf.uint32), integer)
        ones = tf.bitcast(mantissas | tf.constant(one, integer), dtype)  # from 1 to 2
        return ones - tf.cast(1, dtype)

    _random.get_key_counter_alg = select_philox
    _operations.stateless_random_uniform_v2 = draw_equal
