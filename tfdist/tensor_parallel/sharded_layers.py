"""Layers that compute on parts of their variables: Dense, EinsumDense, Embedding, attention, and elementwise ones.

Which axis of a tensor is split is seen by its shape: the part of an axis is shorter than the axis of the layer's
complete variable, or of the symbolic tensor.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import set_mask
from tfdist.keras_internals.layer_calls import (
    dropout_of,
    is_rematerialized,
    kernel_of,
    output_projection_of,
    projections_of,
    table_of,
)
from tfdist.tensor_parallel.shard_group import ShardGroup
from tfdist.tensor_parallel.split_outputs import split_softmax
from tfdist.tensor_parallel.split_variable import part_size

ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
# Those of KerasHub by name. The latter drop elements of their results, of shape [samples, positions, heads, ...].
_DROPS_SCORES, _DROPS_RESULTS = ("CachedMultiHeadAttention",), ("LlamaAttention", "CachedMistralAttention")
_CONTRACTIONS = (keras.layers.Dense, keras.layers.EinsumDense)
_ELEMENTWISE_LAYERS = (
    *(keras.layers.Activation, keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU, keras.layers.Identity),
    *(keras.layers.Add, keras.layers.Subtract, keras.layers.Multiply, keras.layers.Average),
)


def is_elementwise(operation: Any) -> bool:
    """Whether a layer computes each element of its output from the same element of its inputs alone."""
    if type(operation) not in _ELEMENTWISE_LAYERS or operation.activity_regularizer:
        return False
    return not isinstance(operation, keras.layers.Activation) or is_elementwise_function(operation.activation)


def is_attention(layer: Any) -> bool:
    """Whether a layer is an attention of Keras, or one of KerasHub that may keep keys and values in a cache."""
    return type(layer) in ATTENTION or _name_in_hub(layer) in (*_DROPS_SCORES, *_DROPS_RESULTS)


def _name_in_hub(layer: Any) -> str:
    return type(layer).__name__ if type(layer).__module__.startswith("keras_hub.") else ""


def is_dense(layer: Any) -> bool:
    """Whether a layer is a Dense, or an EinsumDense that computes what a Dense does, such as "btd,df->btf"."""
    if type(layer) is not keras.layers.EinsumDense:
        return type(layer) is keras.layers.Dense
    letters = _Letters.of(layer)
    if letters is None or len(letters.kernel) != 2 or (layer.bias is not None and len(layer.bias.shape) != 1):
        return False
    of_input, of_output = letters.kernel[0], letters.kernel[1]
    return (letters.inputs[-1], letters.outputs[-1]) == (of_input, of_output) and letters.inputs[:-1] == (
        letters.outputs[:-1]
    )


def is_softmax(operation: Any) -> bool:
    """Whether a layer is a softmax over the last axis, of which it computes nothing else."""
    if getattr(operation, "activity_regularizer", None):
        return False
    if type(operation) is keras.layers.Activation:
        return operation.activation is keras.activations.softmax
    return type(operation) is keras.layers.Softmax and operation.axis == -1


def drops_parts(operation: Any) -> bool:
    """Whether a layer is a Dropout that can drop elements of a split tensor; see `dropped`."""
    is_plain = type(operation) is keras.layers.Dropout and not operation.activity_regularizer
    return is_plain and not is_rematerialized(operation)


def takes_parts(operation: Any, axis: int) -> bool:
    """Whether the call of a layer that knows shards takes inputs that are split along an axis, counted from the end.

    Along other axes than those of its kernel it does not: the gradient of a whole kernel would be that of a part.
    """
    if type(operation) not in _CONTRACTIONS:
        return False
    letters = _Letters.of(operation)
    return letters is not None and -axis <= len(letters.inputs) and letters.inputs[axis] in letters.kernel


def aware_layers(operation: Any, axes: Mapping[int, int]) -> Iterator[Any]:
    """Yields the layers of a layer call that compute on parts of variables; `axes` is by the id of a split one."""
    is_split = is_attention(operation) and all(
        axes.get(id(kernel_of(projection))) == 1 for projection in projections_of(operation)
    )
    if is_split and not is_rematerialized(operation):
        inner = [*projections_of(operation), output_projection_of(operation)]
        if all(map(_is_plain, inner)):
            yield from inner
    elif (type(operation) in _CONTRACTIONS or is_embedding(operation)) and _is_plain(operation):
        yield operation


def split_dropouts(layer: Any) -> list[tuple[Any, int, int | None]]:
    """Returns the Dropout inside of an attention that is split by heads, with the axis of heads, without padding."""
    if not is_attention(layer):
        return []
    return [(dropout_of(layer), 2 if _name_in_hub(layer) in _DROPS_RESULTS else 1, None)]


def _is_plain(layer: Any) -> bool:
    is_changed = getattr(layer, "lora_enabled", False) or layer.quantization_mode or layer.activity_regularizer
    contracts = type(layer) is not keras.layers.EinsumDense or _Letters.of(layer) is not None
    return contracts and not is_changed and not is_rematerialized(layer)


def aware_call(layer: Any, group: ShardGroup, axes: Mapping[int, int]) -> Callable[..., Any]:
    """Returns what takes the place of the `call` of one of `aware_layers`."""
    of_embedding = _reversible if is_reversible(layer) else _looked_up
    return partial(of_embedding if isinstance(layer, keras.layers.Embedding) else _contracted, layer, group, axes)


@dataclass(frozen=True)
class _Letters:
    """The axes of a contraction: letters of the inputs, the kernel and the outputs, from the last axis on."""

    inputs: str
    kernel: str
    outputs: str

    @classmethod
    def of(cls, layer: Any) -> "_Letters | None":
        """Returns the letters of a Dense or EinsumDense; None if its equation is not of two operands.

        Nor if further axes follow the letters.
        """
        if isinstance(layer, keras.layers.Dense):
            return cls("i", "io", "o")
        given, _, outputs = layer.equation.replace(" ", "").partition("->")
        inputs, _, kernel = given.partition(",")
        found = cls(inputs.removeprefix("..."), kernel, outputs.removeprefix("..."))
        parts = (found.inputs, found.kernel, found.outputs)
        return found if all(parts) and "." not in "".join(parts) else None


def _contracted(
    layer: Any, group: ShardGroup, axes: Mapping[int, int], inputs: tf.Tensor, training: Any = None
) -> tf.Tensor:
    """Dense and EinsumDense: by columns if the split axis of the kernel is one of the outputs, by rows if not."""
    letters, kernel = _Letters.of(layer), tf.convert_to_tensor(layer.kernel)
    assert letters is not None
    whole = dict(zip(letters.kernel, kernel_of(layer).shape, strict=True))
    axis = axes.get(id(kernel_of(layer)))
    split = None if axis is None else letters.kernel[axis]
    for letter in letters.inputs:
        position = letters.inputs.index(letter) - len(letters.inputs)
        is_part = letter in whole and inputs.shape[position] != whole[letter]
        if letter == split and not is_part:
            inputs = group.part(inputs, position)
        elif letter != split and is_part:
            inputs = group.gather(inputs, position, whole[letter])
        elif letter == split:  # a function of zeros, such as a sigmoid, may not be zero
            inputs = group.real(inputs, position, whole[letter])
    if split is not None and split not in letters.inputs:
        inputs = group.enter(inputs)
    is_dense = isinstance(layer, keras.layers.Dense)
    result = keras.ops.matmul(inputs, kernel) if is_dense else keras.ops.einsum(layer.equation, inputs, kernel)
    split_output: int | None = None
    if split is not None and split not in letters.outputs:
        result = group.sum(result)
    elif split is not None:
        split_output = letters.outputs.index(split) - len(letters.outputs)
    if layer.bias is not None:
        result += _fitting(layer.bias, group, axes, split_output)
    if split_output == -1 and layer.activation is keras.activations.softmax:
        return split_softmax(result, group, None if split is None else whole[split])
    if split_output is not None and not is_elementwise_function(layer.activation):
        result = group.gather(result, split_output, None if split is None else whole[split])
    return result if layer.activation is None else layer.activation(result)


def _fitting(bias: Any, group: ShardGroup, axes: Mapping[int, int], split_output: int | None) -> tf.Tensor:
    """Returns what is added to outputs that are split along `split_output`: the part of a bias, or all of it."""
    value, axis = tf.convert_to_tensor(bias), axes.get(id(bias))
    own = None if axis is None else axis - len(bias.shape)
    if own is not None and own != split_output:
        value, own = group.gather(value, own, bias.shape[own], has_samples=False), None
    if split_output is None or own is not None:
        return value
    if -split_output > len(bias.shape) or bias.shape[split_output] == 1:
        return group.enter(value)
    return group.part(value, split_output, has_samples=False)


def dropped(
    layer: Any,
    call: Callable[..., Any],
    group: ShardGroup,
    inputs: tf.Tensor,
    training: Any = False,
    *,
    axis: int,
    size: int | None,
) -> tf.Tensor:
    """Dropout of a tensor that is split along `axis`: the part of the mask that one process would draw.

    The `call` is that of the Dropout layer itself. `size` is that of the axis on all devices together; None if they
    have equal parts without padding.
    """
    if not training or not layer.rate:
        return inputs
    position = axis % inputs.shape.rank
    shape = [tf.shape(inputs)[index] if size is None else size for index, size in enumerate(inputs.shape)]
    shape[position] = shape[position] * group.ways if size is None else size
    ones = tf.ones(tf.stack(shape), inputs.dtype)
    ones.set_shape([None if size is None else shape[index] for index, size in enumerate(inputs.shape)])
    return inputs * group.part(tf.stop_gradient(call(ones, training=training)), position)


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
    constants = [operation.outputs[0].shape.rank for operation in operations if operation.type == "Const"]
    is_known = not concrete.captured_inputs and all(operation.type in _OPERATIONS for operation in operations)
    return is_known and not any(constants) and concrete.outputs[0].shape.as_list() == [None, None]


_REVERSIBLE = getattr(keras.layers, "ReversibleEmbedding", None)  # since Keras 3.12


def is_reversible(layer: Any) -> bool:
    """Whether a layer is a `keras.layers.ReversibleEmbedding`, also a subclass with the same `call`."""
    return _REVERSIBLE is not None and getattr(type(layer), "call", None) is _REVERSIBLE.call


def is_embedding(layer: Any) -> bool:
    """Whether a layer is an embedding that can be computed from parts."""
    return type(layer) is keras.layers.Embedding or is_reversible(layer)


def _looked_up(layer: Any, group: ShardGroup, axes: Mapping[int, int], inputs: tf.Tensor) -> tf.Tensor:
    table = tf.convert_to_tensor(layer.embeddings)
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    if axes.get(id(table_of(layer))) != 0:
        return tf.cast(keras.ops.take(table, ids, axis=0), layer.compute_dtype)
    words = table_of(layer).shape[0]
    rows = part_size(words, group.ways)
    ids = tf.where(ids < 0, ids + words, ids)  # as Keras does
    own = ids - tf.cast(group.own_rank(), ids.dtype) * rows
    is_own, is_known = (own >= 0) & (own < rows), (ids >= 0) & (ids < words)
    # As in TensorFlow, an unknown word is an error on CPUs, and a row of zeros on GPUs.
    found = tf.gather(table, tf.where(is_own, own, tf.where(is_known, tf.zeros([], ids.dtype), rows)))
    found = tf.where(is_own[..., tf.newaxis], found, tf.zeros([], found.dtype))
    return group.sum(tf.cast(found, layer.compute_dtype))


def _reversible(
    layer: Any, group: ShardGroup, axes: Mapping[int, int], inputs: tf.Tensor, reverse: bool = False
) -> tf.Tensor:
    """Looks up rows, or multiplies whole values with the table: logits, split by words if the table is."""
    if not reverse:
        result = _looked_up(layer, group, axes, inputs)
        if layer.mask_zero:
            set_mask(result, tf.not_equal(inputs, 0))
        return result
    held = table_of(layer) if layer.tie_weights else layer.reverse_embeddings
    axis = axes.get(id(held))
    table = tf.transpose(tf.convert_to_tensor(layer.embeddings)) if layer.tie_weights else tf.convert_to_tensor(held)
    if layer.reverse_dtype is not None:
        inputs, table = tf.cast(inputs, layer.reverse_dtype), tf.cast(table, layer.reverse_dtype)
    by_words = None if axis is None else axis == (0 if layer.tie_weights else 1)
    if by_words is not None:
        inputs = group.enter(inputs) if by_words else group.part(inputs, -1)
    logits = keras.ops.matmul(inputs, table)
    if by_words is False:
        logits = group.sum(logits)
    limit = layer.logit_soft_cap
    return logits if limit is None else tf.tanh(logits / limit) * limit
