"""Rejects models whose step cannot run in stages, before it is traced."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import overridden_method, overrides_compute_loss
from tfdist.keras_internals.keras_updates import overridden_update
from tfdist.keras_internals.layer_calls import layers_inside
from tfdist.keras_internals.model_introspection import is_made_under
from tfdist.keras_internals.placed_variables import optimizers_of


def check_model_for_stages(model: Any, strategy: Any, step: str) -> None:
    """Raises an error if a step of `model` cannot run in stages.

    Args:
        model: The Keras model.
        strategy: The strategy that runs the step.
        step: "train_step", "test_step" or "predict_step".

    Raises:
        ValueError: The message gives the reason and the remedy.
    """
    if tf.executing_eagerly():
        raise ValueError(
            "Stages run in a compiled function. Received: a model with run_eagerly=True, or "
            "`tf.config.run_functions_eagerly(True)`. Expected: graph mode. Leave out `run_eagerly`, and debug the "
            "model without the strategy."
        )
    if model.jit_compile is True:
        raise ValueError(
            "XLA cannot compile a step whose stages are on several devices. Received: jit_compile=True. Expected: "
            "jit_compile=False in `compile`, or the default."
        )
    own = overridden_method(model, step)
    if own is not None:
        raise ValueError(
            f"A model with its own `{own}` cannot be cut into stages, because that method computes the complete model "
            f"at once. Received: {type(model).__name__}.{own}. Expected: the method of keras.Model. Move the loss into "
            "`compile` or `add_loss`, or use a data-parallel strategy."
        )
    if step != "predict_step":
        _check_own_loss(model)
    if step == "train_step":
        _check_optimizer(model, strategy)
    for reason, layer in _unsupported_layers(model):
        raise ValueError(
            f"A layer cannot compute a batch in micro-batches: {reason}. Received: {type(layer).__name__} "
            f"{layer.name!r}. Expected: a layer whose samples do not depend on each other or on earlier batches. "
            "Replace the layer, or use a data-parallel strategy."
        )


def _check_optimizer(model: Any, strategy: Any) -> None:
    if model.optimizer is None or not is_made_under(model.optimizer, strategy):
        raise ValueError(
            "The optimizer was created outside the strategy's scope. Received: "
            f"{'no optimizer' if model.optimizer is None else repr(model.optimizer.name)}. Expected: the model, the "
            "optimizer and `model.compile` within one `with strategy.scope():` block. Move them there."
        )
    optimizer, _ = optimizers_of(model.optimizer)
    method = overridden_update(optimizer)
    if method is not None:
        raise ValueError(
            f"An optimizer with its own `{method}` cannot update stages, because each stage updates its own variables. "
            f"Received: {type(optimizer).__name__}.{method}. Expected: an optimizer that overrides `update_step` "
            "only."
        )
    overwritten = [one.path for one in model.trainable_variables if getattr(one, "overwrite_with_gradient", False)]
    if overwritten:
        raise ValueError(
            "Variables of float8 layers cannot be trained in stages. Received: "
            f"{overwritten[0]!r}, whose gradient is its new value. Expected: layers in float32, bfloat16 or float16. "
            "Do not quantize layers to float8."
        )


def _check_own_loss(model: Any) -> None:
    if overrides_compute_loss(model) and any(getattr(one, "regularizer", None) for one in model.trainable_variables):
        raise ValueError(
            "A model with its own `compute_loss` cannot have weight regularizers in stages, because its loss is "
            f"computed on the last stage. Received: {type(model).__name__}.compute_loss and a regularizer. Expected: "
            "one of them. Use weight decay of the optimizer instead of regularizers, or a loss in `compile`."
        )


def _unsupported_layers(model: Any) -> Iterator[tuple[str, Any]]:
    for layer in [model, *layers_inside(model)]:
        if getattr(layer, "synchronized", False):
            yield "it uses the statistics of the complete batch (synchronized=True)", layer
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            yield "it passes states from batch to batch (stateful=True)", layer
