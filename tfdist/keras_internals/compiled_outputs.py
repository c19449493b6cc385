"""Which losses and metrics of a compiled model use which of its outputs, and what takes their place in a trace."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import LossFunctionWrapper
from tfdist.private_symbols import private
from tfdist.utils.temporary_values import setting_attributes

private("keras.src.trainers.compile_utils:CompileLoss.Loss", "the loss of an output, with its place in the outputs")
private("keras.src.trainers.compile_utils:CompileMetrics._flatten_y", "orders outputs as their metrics")

_ACCURACIES = (keras.metrics.SparseCategoricalAccuracy, keras.metrics.CategoricalAccuracy)
_CROSSENTROPIES = (keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy)


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
        for metric, _ in functions:
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
