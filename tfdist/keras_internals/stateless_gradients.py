"""The loss of a batch and its gradients, computed without effects on a model."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.layer_calls import initial_scope

# The distance of 1 to the next number.
_FLOAT32, _TENSOR_FLOAT32 = 2.0**-23, 2.0**-10
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def loss_and_gradients(
    model: Any, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], data: Any
) -> list[tf.Tensor]:
    """Returns the loss of a batch, and its gradients by the trainable weights that it depends on.

    The model computes as in inference (`training=False`). No variable is read or written: not those of weights,
    metrics, batch statistics and seeds.

    Args:
        model: A model whose loss is compiled, or computed by its `compute_loss`.
        variables: All of its variables.
        values: Their values.
        data: The batch, as `fit` gets it.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    trainable = {id(variable) for variable in model.trainable_variables}
    watched = [value for variable, value in zip(variables, values, strict=True) if id(variable) in trainable]
    metrics = model.metrics_variables
    zeros = [tf.zeros(variable.shape, variable.dtype) for variable in metrics]
    training = {"training": False} if model._call_has_training_arg else {}
    with initial_scope([*variables, *metrics], [*values, *zeros]), tf.GradientTape() as tape:
        tape.watch(watched)
        loss = model.compute_loss(x, y, model(x, **training), sample_weight)
    gradients = tape.gradient(loss, watched)
    return [loss, *(tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None)]


def rounding_error(model: Any) -> float:
    """Returns the machine epsilon of the least exact dtype in which a layer of `model` computes."""
    on_tensor_cores = tf.config.experimental.tensor_float_32_execution_enabled() and tf.config.list_logical_devices(
        "GPU"
    )
    other = _TENSOR_FLOAT32 if on_tensor_cores else _FLOAT32
    return max(_EPSILONS.get(layer.compute_dtype, other) for layer in model._flatten_layers())
