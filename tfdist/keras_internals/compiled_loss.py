"""The compiled losses and metrics of a model: of a micro-batch, and of single outputs in a trace."""

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import LossFunctionWrapper
from tfdist.utils.temporary_values import setting_attributes

_ACCURACIES = (keras.metrics.SparseCategoricalAccuracy, keras.metrics.CategoricalAccuracy)
_CROSSENTROPIES = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)


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
    model: Any, step: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
) -> tuple[Any, list[Any]]:
    """Computes the loss of a part of a batch.

    The model's compiled loss is built, and `step`, a `LossStep`, is the current one. Only a `compute_loss` of the
    model's class needs `x`.

    Returns:
        The part of the loss of the batch, and the part of each output's loss if the model has several.
    """
    compiled = model._compile_loss
    metrics = [] if compiled is None else list(compiled.metrics)
    of_outputs: list[Any] = []
    recorder = types.SimpleNamespace(update_state=lambda values, sample_weight=None: of_outputs.append(values))
    step.has_scaled = False
    with nullcontext() if compiled is None else setting_attributes(compiled, _metrics=[recorder for _ in metrics]):
        if overrides_compute_loss(model):
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        else:
            loss = step.as_part(compiled(y, y_pred, sample_weight), is_mean=not step.has_scaled)
    return loss, of_outputs


def update_loss_metrics(model: Any, loss: tf.Tensor, of_outputs: list[tf.Tensor], y_pred: Any, samples: Any) -> None:
    """Updates the metric of the loss, and those of the outputs' losses, as Keras does in a step on the batch."""
    model._loss_tracker.update_state(loss, sample_weight=samples)
    metrics = [] if model._compile_loss is None else model._compile_loss.metrics
    for metric, value in zip(metrics, of_outputs, strict=bool(of_outputs)):
        metric.update_state(value, sample_weight=tf.nest.flatten(y_pred)[0].shape[0])


def losses_of_outputs(model: Any, packed: Callable[[Sequence[int]], Any], count: int) -> list[tuple[list[int], Any]]:
    """Returns for each loss of a model, which is built, the numbers of the outputs that it takes, and the loss.

    `packed` packs a list with an item for each of `count` outputs into their structure.
    """
    compiled = model._compile_loss
    if compiled is None:
        return []
    numbers = packed(range(count))
    if count > 1:
        numbers = keras.tree.pack_sequence_as(compiled._y_pred_build_structure, keras.tree.flatten(numbers))
    losses = []
    for entry in compiled._flat_losses:
        of_loss = numbers
        for key in entry.path if count > 1 else ():
            of_loss = of_loss[key]
        losses.append((keras.tree.flatten(of_loss), entry.loss))
    return losses


def metrics_of_outputs(model: Any, packed: Callable[[Sequence[int]], Any], count: int) -> list[list[Any]]:
    """Returns the compiled metrics of each output. The arguments are those of `losses_of_outputs`."""
    compiled = model._compile_metrics
    metrics_by_output: list[list[Any]] = [[] for _ in range(count)]
    if compiled is None or not compiled.built:
        return metrics_by_output
    for of_outputs in (compiled._flat_metrics, compiled._flat_weighted_metrics):
        for number, metrics in zip(compiled._flatten_y(packed(range(count))), of_outputs, strict=True):
            metrics_by_output[number] += [] if metrics is None else metrics.metrics
    return metrics_by_output


@contextmanager
def replaced_losses(model: Any, calls: Mapping[int, Callable[[Any, Any], Any]]) -> Iterator[None]:
    """In the body, the losses with these numbers compute values of samples by functions of targets and predictions."""
    if not calls:
        yield
        return
    compiled = model._compile_loss
    replaced = [
        entry._replace(loss=_with_call(entry.loss, calls[number])) if number in calls else entry
        for number, entry in enumerate(compiled._flat_losses)
    ]
    with setting_attributes(compiled, _flat_losses=replaced):
        yield


def _with_call(loss: Any, call: Callable[[Any, Any], Any]) -> Any:
    copied = copy.copy(loss)
    vars(copied)["call"] = call
    return copied


def crossentropy_options(loss: Any) -> dict[str, Any] | None:
    """Returns the arguments of a cross-entropy of Keras over the last axis, with `is_sparse`; None for another loss."""
    if type(loss) not in (*_CROSSENTROPIES, LossFunctionWrapper):
        return None
    is_sparse = loss.fn is keras.losses.sparse_categorical_crossentropy
    if not is_sparse and loss.fn is not keras.losses.categorical_crossentropy:
        return None
    defaults = {"from_logits": False, "axis": -1, "ignore_class": None, "label_smoothing": 0.0}
    options = {**defaults, **loss._fn_kwargs, "is_sparse": is_sparse}
    return options if options.pop("axis") == -1 else None


def is_accuracy(metric: Any) -> bool:
    """Whether a metric uses only the index of the largest element of the predictions' last axis."""
    return type(metric) in _ACCURACIES


@contextmanager
def accuracies_of_choices(metrics: Sequence[Any]) -> Iterator[None]:
    """In the body, metrics for which `is_accuracy` take these indices, int32, as predictions."""
    functions = [(metric, metric._fn) for metric in metrics]
    try:
        for metric in metrics:
            is_sparse = isinstance(metric, keras.metrics.SparseCategoricalAccuracy)
            metric._fn = _sparse_matches if is_sparse else _matches
        yield
    finally:
        for metric, function in functions:
            metric._fn = function


def _sparse_matches(y_true: Any, choices: tf.Tensor) -> tf.Tensor:
    targets = tf.cast(y_true, choices.dtype)
    if targets.shape.rank == choices.shape.rank + 1:
        targets = tf.squeeze(targets, -1)
    matches = tf.cast(tf.equal(targets, choices), keras.config.floatx())
    return tf.squeeze(matches, -1) if matches.shape.rank > 1 and matches.shape[-1] == 1 else matches


def _matches(y_true: Any, choices: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.equal(tf.argmax(y_true, -1, choices.dtype), choices), keras.config.floatx())


def logits_behind(tensor: Any) -> tf.Tensor | None:
    """Returns the logits of what a softmax of Keras has returned, from which Keras computes cross-entropies."""
    return getattr(tensor, "_keras_logits", None)


def note_logits(tensor: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Notes the logits of the result of a softmax, as Keras does, and returns the result."""
    tensor._keras_logits = logits
    return tensor
