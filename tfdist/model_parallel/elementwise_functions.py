"""Which functions compute each element of their result from the same element of their argument alone."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_OF_KERAS = frozenset(
    "celu elu exponential gelu hard_sigmoid hard_silu hard_tanh leaky_relu linear log_sigmoid mish relu relu6 selu "
    "sigmoid silu softplus softsign tanh".split()
)
# TensorFlow's operations that compute each element from the same elements of their inputs, which may be broadcast.
ELEMENTWISE = frozenset(
    "Abs Add AddV2 Cast Cos Elu Erf Erfc Exp Expm1 Identity LeakyRelu Log Log1p Maximum Minimum Mul Neg Pow RealDiv "
    "Relu Relu6 Rsqrt Selu Sigmoid Sign Sin Softplus Softsign Sqrt Square SquaredDifference Sub Tanh".split()
)
# Further ones in the trace of a function of one tensor and scalars.
_OPERATIONS = ELEMENTWISE | frozenset(
    "Ceil ClipByValue Const Cosh Floor Greater GreaterEqual Inv Less LessEqual Placeholder Reciprocal Select SelectV2 "
    "Sinh ZerosLike".split()
)


def is_elementwise_function(function: Callable[[Any], Any] | None) -> bool:
    """Whether a function of one tensor, such as an activation, is elementwise; None is.

    Functions that are not Keras' own are traced: they are if they use nothing but elementwise operations and scalars.

    >>> is_elementwise_function(keras.activations.gelu), is_elementwise_function(keras.activations.softmax)
    (True, False)
    >>> is_elementwise_function(lambda x: keras.activations.gelu(x, approximate=True))
    True
    """
    name = getattr(function, "__name__", "")
    if function is None or name in _OF_KERAS and function is getattr(keras.activations, name):
        return True
    return not isinstance(function, keras.layers.Layer) and _is_traced_elementwise(function)


@functools.lru_cache(maxsize=256)
def _is_traced_elementwise(function: Callable[[Any], Any]) -> bool:
    try:
        with tf.init_scope(), tf.device(None):
            traced = tf.function(lambda x: function(x) + 0.0, autograph=False)
            # Of unknown width: it may not depend on the width, which is another one for a part.
            concrete = traced.get_concrete_function(tf.TensorSpec([None, None], tf.float32))
    except Exception:  # whatever it raises, it is not known to be elementwise
        return False
    operations = concrete.graph.get_operations()
    constants = [one.outputs[0].shape.rank for one in operations if one.type == "Const"]
    is_known = not concrete.captured_inputs and all(one.type in _OPERATIONS for one in operations)
    return is_known and not any(constants) and concrete.outputs[0].shape.as_list() == [None, None]
