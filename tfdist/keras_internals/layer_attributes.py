"""What Keras' layers keep in attributes without a public name: variables and inner layers.

Those of a layer's instance exist since Keras 3.10; they cannot be looked up in its class.
"""

from typing import Any

import keras


def kernel_of(layer: Any) -> keras.Variable:
    """Returns the variable of the kernel of a Dense or EinsumDense, whose `kernel` is a value that LoRA may change."""
    return layer._kernel


def table_of(embedding: Any) -> keras.Variable:
    """Returns the variable of an embedding's table, whose `embeddings` is a value that LoRA may change."""
    return embedding._embeddings


def projections_of(attention: Any) -> list[Any]:
    """Returns the layers of an attention whose results have an axis of heads: query, key, value and, if any, gate."""
    names = ("_query_dense", "_key_dense", "_value_dense", "_gate_dense")
    return [vars(attention)[name] for name in names if name in vars(attention)]


def output_projection_of(attention: Any) -> Any:
    """Returns the layer of an attention that joins the heads."""
    return attention._output_dense


def dropout_of(attention: Any) -> Any:
    """Returns the layer that drops scores of an attention."""
    return attention._dropout_layer


def is_rematerialized(layer: Any) -> bool:
    """Whether a layer is computed again in the backward pass."""
    return bool(getattr(layer, "_remat_mode", None))


def layers_inside(layer: Any) -> list[Any]:
    """Returns the layers inside of a layer, also those inside of these, without the layer itself."""
    return list(layer._flatten_layers(include_self=False))
