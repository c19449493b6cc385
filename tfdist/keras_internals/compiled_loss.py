"""The loss of a compiled model on a micro-batch, without the losses that its layers add."""

from contextlib import nullcontext
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist.utils.temporary_values import setting_attributes


class ScalesLosses(Protocol):
    """Makes a loss over some samples a part of the loss of the whole batch, as a `LossStep` does."""

    has_scaled: bool

    def as_part(self, loss: Any, *, is_mean: bool) -> Any:
        """Returns the part of a loss."""


class _Recorder:
    """Takes the place of the metric of an output's loss, and keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        self.values.append(values)


def has_compiled_loss(model: Any) -> bool:
    """Whether a batch has a loss beside those of layers, from `compile(loss=...)` or the model's `compute_loss`."""
    return model._compile_loss is not None or overrides_compute_loss(model)


def has_built_loss(model: Any) -> bool:
    """Whether a model has compiled losses, and has computed them."""
    return has_compiled_loss(model) and getattr(model._compile_loss, "built", False)


def overrides_compute_loss(model: Any) -> bool:
    """Whether the class of the model has its own `compute_loss`."""
    # The methods of Keras are replaced by functions that wrap them.
    return "compute_loss" in {name for base in _own_classes(model) for name in vars(base)}


def variables_of_own_loss(model: Any) -> list[keras.Variable]:
    """Returns the variables that the model's own `compute_loss`, if it has one, may use beside those of its layers.

    These are variables in attributes of the model itself, and those of the metrics that it updates.
    """
    if not overrides_compute_loss(model):
        return []
    own_variables = [*model._trainable_variables, *model._non_trainable_variables]
    own_variables += [generator.state for generator in model._seed_generators]
    return [*own_variables, *(variable for metric in model._metrics for variable in metric.variables)]


def overridden_method(model: Any, *names: str) -> str | None:
    """Returns the first of the methods `names` that the class of the model, or the model itself, overrides."""
    own_names = {name for base in _own_classes(model) for name in vars(base)} | set(vars(model))
    return next((name for name in names if name in own_names), None)


def _own_classes(model: Any) -> list[type]:
    return [base for base in type(model).__mro__ if not base.__module__.startswith(("keras.", "tensorflow."))]


def loss_parts(
    model: Any, step: ScalesLosses, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
) -> tuple[Any, list[Any]]:
    """Computes the loss of a part of a batch.

    The model's compiled loss is built, and `step` is the current one. Only a `compute_loss` of the model's class needs
    `x`.

    Returns:
        The part of the loss of the batch, and the part of each output's loss if the model has several.
    """
    compiled = model._compile_loss
    metrics = [] if compiled is None else list(compiled.metrics)
    recorders = [_Recorder() for _ in metrics]
    step.has_scaled = False
    with nullcontext() if compiled is None else setting_attributes(compiled, _metrics=recorders):
        if overrides_compute_loss(model):
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        else:
            loss = step.as_part(compiled(y, y_pred, sample_weight), is_mean=not step.has_scaled)
    return loss, [value for recorder in recorders for value in recorder.values]


def update_loss_metrics(model: Any, loss: tf.Tensor, of_outputs: list[tf.Tensor], y_pred: Any, samples: Any) -> None:
    """Updates the metric of the loss, and those of the outputs' losses, as Keras does in a step on the batch."""
    model._loss_tracker.update_state(loss, sample_weight=samples)
    metrics = [] if model._compile_loss is None else model._compile_loss.metrics
    for metric, value in zip(metrics, of_outputs, strict=bool(of_outputs)):
        metric.update_state(value, sample_weight=tf.nest.flatten(y_pred)[0].shape[0])
