"""Outputs of a model that stay split over the devices of its last stage: what losses and metrics need, softmax.

Each device has the logits of its words. Of a softmax or cross-entropy over them, only the largest of them, the sum of
exponentials and the logit of the target leave it, one number of each for a position (Shoeybi et al. 2019,
"Megatron-LM"). The gradient needs no exchange.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import (
    crossentropy_options,
    has_built_loss,
    is_accuracy,
    logits_behind,
    losses_of_outputs,
    metrics_of_outputs,
    note_logits,
    overridden_method,
    overrides_compute_loss,
)
from tfdist.keras_internals.functional_graph import FunctionalGraph
from tfdist.keras_internals.keras_symbols import set_mask
from tfdist.tensor_parallel.shard_group import ShardGroup

WHOLE, CHOICES, NOTHING = "whole", "choices", "nothing"


@dataclass(frozen=True)
class SplitOutput:
    """An output of which each device has a part of the last axis.

    Attributes:
        number: Its number among the outputs.
        losses: By number of a loss of the model, the options of its cross-entropy, which is computed from the parts.
        reason: What needs whole outputs on all devices; empty if nothing does.
        accuracies: The metrics that take the index of the largest element.
        metrics: What the metrics take: `WHOLE` outputs, on one device; `CHOICES`, the indices; or `NOTHING`.
    """

    number: int
    losses: Mapping[int, Mapping[str, Any]]
    reason: str
    accuracies: Sequence[Any]
    metrics: str


def split_outputs(model: Any, graph: FunctionalGraph) -> list[SplitOutput]:
    """Returns for each output of a model, which may be compiled, what a step does with it if it is split."""
    count = len(graph.outputs)
    losses = losses_of_outputs(model, graph.packed_outputs, count) if has_built_loss(model) else []
    of_outputs = metrics_of_outputs(model, graph.packed_outputs, count)
    own_loss = overrides_compute_loss(model)
    own_metrics = overridden_method(model, "compute_metrics") is not None
    found = []
    for number, metrics in enumerate(of_outputs):
        options: dict[int, Mapping[str, Any]] = {}
        reason = f"{type(model).__name__}.compute_loss" if own_loss else ""
        for index, (numbers, loss) in enumerate(losses):
            of_loss = crossentropy_options(loss) if numbers == [number] else None
            if number in numbers and of_loss is None:
                reason = getattr(loss, "name", type(loss).__name__)
            elif of_loss is not None:
                options[index] = of_loss
        known = not own_metrics and all(map(is_accuracy, metrics)) and graph.outputs[number].shape[-1] < LARGEST_INDEX
        needs = WHOLE if not known else CHOICES if metrics else NOTHING
        found.append(SplitOutput(number, {} if reason else options, reason, metrics if known else (), needs))
    return found


def describe_outputs(model: Any, outputs: Sequence[SplitOutput], names: Sequence[str]) -> list[str]:
    """Returns a line for each split output: what its loss and its metrics exchange.

    The losses of a model are known after the first batch. `names` are those of the layers that return the outputs.
    """
    lines, is_known = [], has_built_loss(model) or overrides_compute_loss(model)
    for output, name in zip(outputs, names, strict=True):
        if not is_known:
            lines.append(f"output {name} is split; what is gathered for losses and metrics is known after a batch")
        elif output.reason:
            lines.append(f"output {name} is gathered on all devices of the last stage for {output.reason}")
        else:
            computed = "loss and accuracy are" if output.metrics == CHOICES else "the loss is"
            gathered = "; gathered on one device for metrics" if output.metrics == WHOLE else ""
            lines.append(f"output {name} stays split: {computed} computed from the parts{gathered}")
    return lines


LARGEST_INDEX = 1 << 24  # up to which float32 has all whole numbers
_LOWEST = -1e30  # of what pads logits; its product with zero is zero


def split_softmax(part: tf.Tensor, group: ShardGroup, size: int | None = None) -> tf.Tensor:
    """Returns the part of a softmax over the last axis, of `size` elements, of which `part` is this device's part."""
    x = group.real(_precise(part), -1, size, _LOWEST)
    exponentials = tf.exp(x - _largest(x, group))
    total = group.enter(group.sum(tf.reduce_sum(exponentials, -1, keepdims=True)))
    return note_logits(tf.cast(exponentials / total, part.dtype), part)


def choices_of_parts(part: tf.Tensor, group: ShardGroup, size: int | None = None) -> tf.Tensor:
    """Returns the index of the largest element of the last axis, int32 without this axis; the first one of equals."""
    return _largest_and_choice(group.real(_precise(part), -1, size, _LOWEST), group)[1]


class SplitCrossentropy:
    """A cross-entropy of Keras for predictions of which each device has a part of the last axis.

    Attributes:
        choices: After a call, the index of the largest prediction of each position, int32, if it is asked for.
    """

    def __init__(
        self,
        group: ShardGroup,
        *,
        size: int | None = None,
        is_sparse: bool,
        from_logits: bool,
        ignore_class: int | None,
        label_smoothing: float,
        with_choices: bool,
    ) -> None:
        """Creates the loss with the arguments of Keras' class.

        The last axis has `size` elements on all devices together; None if they have equal parts without padding.
        Targets are indices if the loss `is_sparse`. `with_choices`: `choices` are wanted, too; they share an exchange
        with the largest logits.
        """
        self._group, self._size, self._is_sparse, self._from_logits = group, size, is_sparse, from_logits
        self._ignored, self._smoothing, self._with_choices = ignore_class, label_smoothing, with_choices
        self.choices: tf.Tensor | None = None

    def __call__(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each position, as the `call` of Keras' class does for whole predictions."""
        logits = logits_behind(y_pred)
        if logits is not None and self._ignored is None:
            return self._of_logits(y_true, logits)
        if self._from_logits:
            return self._of_logits(y_true, y_pred)
        epsilon = keras.config.epsilon()
        if self._is_sparse:
            return self._of_logits(y_true, tf.math.log(tf.clip_by_value(y_pred, epsilon, 1 - epsilon)))
        if self._with_choices:
            self.choices = choices_of_parts(y_pred, self._group, self._size)
        y_pred = self._group.real(y_pred, -1, self._size)
        total = self._group.enter(self._group.sum(tf.reduce_sum(y_pred, -1, keepdims=True)))
        likely = tf.math.log(tf.clip_by_value(y_pred / total, epsilon, 1 - epsilon))
        own = self._group.part(self._smoothed(y_true, y_pred.dtype), -1)
        return -self._group.sum(tf.reduce_sum(own * likely, -1))

    def _of_logits(self, y_true: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        x = self._group.real(_precise(logits), -1, self._size, _LOWEST)
        if self._with_choices:
            largest, self.choices = _largest_and_choice(x, self._group)
        else:
            largest = _largest(x, self._group)
        if not self._is_sparse:
            return tf.cast(self._of_probabilities(self._smoothed(y_true, x.dtype), x, largest), logits.dtype)
        targets = tf.cast(y_true, tf.int64)
        if targets.shape.rank == x.shape.rank:
            targets = tf.squeeze(targets, -1)
        if self._ignored is None:
            return tf.cast(self._of_indices(targets, x, largest), logits.dtype)
        is_valid = tf.not_equal(targets, self._ignored)
        values = self._of_indices(tf.where(is_valid, targets, 0), x, largest)
        result = tf.cast(tf.where(is_valid, values, 0.0), logits.dtype)
        set_mask(result, is_valid)
        return result

    def _smoothed(self, y_true: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        targets = tf.cast(y_true, dtype)
        if not self._smoothing:
            return targets
        return targets * (1.0 - self._smoothing) + self._smoothing / tf.cast(tf.shape(targets)[-1], dtype)

    def _of_indices(self, targets: tf.Tensor, x: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
        group, size = self._group, x.shape[-1]
        own = targets - tf.cast(group.own_rank(), targets.dtype) * size
        words = size * group.ways if self._size is None else self._size
        is_own, is_known = (own >= 0) & (own < size), (targets >= 0) & (targets < words)

        def of_target(shifted: tf.Tensor) -> tf.Tensor:
            # As in TensorFlow, an unknown target is an error on CPUs, and gives NaN on GPUs.
            index = tf.where(is_known, tf.where(is_own, own, 0), targets)
            found = tf.gather(shifted, index, batch_dims=targets.shape.rank)
            return tf.where(is_own, found, tf.where(is_known, tf.zeros([], x.dtype), float("nan")))

        hot = lambda: tf.one_hot(own, size, dtype=x.dtype)  # noqa: E731
        return _crossentropy(x, largest, group, of_target, hot, tf.ones([], x.dtype))

    def _of_probabilities(self, targets: tf.Tensor, x: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
        own = self._group.part(tf.stop_gradient(targets), -1)
        of_targets = lambda shifted: tf.reduce_sum(own * shifted, -1)  # noqa: E731
        return _crossentropy(x, largest, self._group, of_targets, lambda: own, tf.reduce_sum(targets, -1))


def _crossentropy(
    x: tf.Tensor,
    largest: tf.Tensor,
    group: ShardGroup,
    of_target: Callable[[tf.Tensor], tf.Tensor],
    probabilities: Callable[[], tf.Tensor],
    weight: tf.Tensor,
) -> tf.Tensor:
    """Returns `weight * log(sum(exp(x))) - of_target(x)`; its gradient is TensorFlow's, as if the weight were 1."""

    @tf.custom_gradient
    def loss(logits: tf.Tensor) -> Any:
        shifted = logits - largest
        exponentials = tf.exp(shifted)
        own = tf.stack([tf.reduce_sum(exponentials, -1), of_target(shifted)], -1)
        total, of_targets = tf.unstack(group.sum(own), num=2, axis=-1)

        def of_logits(gradient: tf.Tensor) -> tf.Tensor:
            return (exponentials / total[..., tf.newaxis] - probabilities()) * gradient[..., tf.newaxis]

        return weight * tf.math.log(total) - of_targets, of_logits

    return loss(x)


def _precise(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.dtype == tf.float64 else tf.cast(tensor, tf.float32)


def _largest(part: tf.Tensor, group: ShardGroup) -> tf.Tensor:
    """Returns the largest element of the last axis, whose size becomes 1."""
    own = tf.reduce_max(tf.stop_gradient(part), -1, keepdims=True)
    return tf.stop_gradient(tf.reduce_max(group.gather(own, -1), -1, keepdims=True))


def _largest_and_choice(part: tf.Tensor, group: ShardGroup) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the largest element, as `_largest`, and its index."""
    x, size = tf.stop_gradient(part), part.shape[-1]
    index = tf.argmax(x, -1, tf.int32) + group.own_rank() * size
    own = tf.stack([tf.reduce_max(x, -1), tf.cast(index, x.dtype)], -1)
    everyone = tf.stop_gradient(group.gather(own, -1))
    values, indices = everyone[..., 0::2], everyone[..., 1::2]
    first = tf.argmax(values, -1, tf.int32)
    choice = tf.cast(tf.gather(indices, first, batch_dims=first.shape.rank), tf.int32)
    return tf.reduce_max(values, -1, keepdims=True), choice
