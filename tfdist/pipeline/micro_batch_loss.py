"""Scales the losses of a micro-batch so that the sum over all micro-batches is the loss of the batch.

A mean over the samples is multiplied by the micro-batch's fraction of the samples, a sum by 1. A mean may also divide
by something else, such as the number of valid entries of a mask, or the sum of weights. A stage computes the divisor of
its micro-batch, but the backward pass of the first micro-batch begins before the last one has arrived. So the divisors
of the batch are computed beforehand, from masks, targets and weights alone.
"""

import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import loss_parts
from tfdist.keras_internals.functional_graph import FunctionalGraph
from tfdist.keras_internals.keras_symbols import get_mask, set_mask
from tfdist.keras_internals.losses import times
from tfdist.losses.loss_scaling import LossStep
from tfdist.losses.pruned_function import PrunedFunction
from tfdist.utils.temporary_values import setting, setting_attributes

_current: contextvars.ContextVar["_PartLoss | None"] = contextvars.ContextVar("tfdist_stage_loss", default=None)


def current_stage_loss() -> "_PartLoss | None":
    """Returns how the losses of the stage that is being traced are scaled, or None."""
    return _current.get()


class _PartLoss(LossStep):
    """How losses of a part of a batch are scaled.

    Attributes:
        num_divisors: The number of divisors, other than the number of samples, that were used so far.
    """

    has_totals = True
    samples_are_static = False  # the loss of an output stays a part
    mean_scale: Any = None
    number_of_samples: Any = None

    def __init__(self, fraction: tf.Tensor, is_real: tf.Tensor, samples: Any) -> None:
        self.fraction = self.mean_scale = fraction
        self.sum_scale, self.number_of_samples = is_real, samples
        self.num_divisors = 0

    @contextmanager
    def running(self, data: Any) -> Iterator[None]:
        """Scales the losses that are computed in the body from `data`, tensors whose first axis holds the samples."""
        self.observe(data, self.number_of_samples)
        with setting(_current, self):
            yield

    def share_of(self, divisor: tf.Tensor) -> AbstractContextManager[None]:
        """Sets `fraction` to this part's share of `divisor`, a float32 scalar, of the batch."""
        divisor = times(tf.stop_gradient(divisor), self.sum_scale)
        return setting_attributes(self, fraction=tf.math.divide_no_nan(divisor, self.total_of(divisor)))

    def total_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all micro-batches of `value`, a float scalar."""
        self.num_divisors += 1
        return self._total(tf.cast(tf.stop_gradient(value), tf.float32))

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError


class MicroBatchLoss(_PartLoss):
    """Scales the losses of a micro-batch.

    Attributes:
        recomputes: Whether the backward pass computes rematerialized functions again.
    """

    recomputes = True

    def __init__(self, fraction: tf.Tensor, is_real: tf.Tensor, samples: Any, divisors: tf.Tensor) -> None:
        """Scales by the arguments of a stage, see `StageInputs`; `samples` is an int or an int32 scalar."""
        super().__init__(fraction, is_real, samples)
        self._divisors = divisors

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        return self._divisors[self.num_divisors - 1]


class DivisorRecording(_PartLoss):
    """Records the divisors of a complete batch.

    Attributes:
        divisors: float32 scalars, in the order in which the losses use them.
    """

    def __init__(self, samples: tf.Tensor) -> None:
        """Creates the recording; `samples` is the number of rows of the batch, an int32 scalar."""
        super().__init__(tf.constant(1.0), tf.constant(1.0), samples)
        self.divisors: list[tf.Tensor] = []

    def _total(self, value: tf.Tensor) -> tf.Tensor:
        self.divisors.append(value)
        return value


def divisors_of(model: Any, graph: FunctionalGraph, batch: Any, number: int, *, training: bool) -> tf.Tensor:
    """Returns the `number` divisors of a batch, a float32 vector, in the order in which the losses use them.

    The model is traced on the complete batch, and the trace is pruned to what the divisors need. For the mask of an
    `Embedding` that is the comparison of ids with zero. The losses get tensors of one number in place of the outputs,
    with their shapes and masks: a divisor may depend on the shape of an output, as that of `ignore_class` does.

    The `batch` has the inputs as the graph has them, and inputs, targets and weights for the losses.
    """
    given = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]

    def of_batch(output: tf.Tensor, *leaves: tf.Tensor) -> tf.Tensor:
        waiting = iter(leaves)
        data = tf.nest.map_structure(lambda leaf: None if leaf is None else next(waiting), batch)
        return tf.stack(_recorded(model, graph, data, output, training=training))

    traced = tf.function(of_batch, autograph=False)
    with tf.init_scope(), tf.device(None):
        specs = [tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in given]
        concrete = traced.get_concrete_function(tf.TensorSpec([], tf.float32), *specs)
        pruned = PrunedFunction(concrete)
    if concrete.outputs[0].shape[0] != number or pruned.reads or 0 in pruned.values:
        raise ValueError(
            "A loss divides by a value that is not known before the predictions. Received: a divisor other than the "
            "number of samples that depends on the model's weights, or on the number of micro-batches. Expected: a "
            "loss that divides by the number of samples, by a sum of sample weights, or by the number of valid entries "
            "of a mask of inputs or targets."
        )
    return pruned(tf.zeros([]), *given)


def _recorded(model: Any, graph: FunctionalGraph, data: Any, output: tf.Tensor, *, training: bool) -> list[tf.Tensor]:
    inputs, (x, y, sample_weight) = data
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    recording = DivisorRecording(tf.shape(leaves[0])[0])
    values = {id(symbolic): tensor for symbolic, tensor in zip(graph.inputs, inputs, strict=True)}
    with recording.running(leaves), keras.StatelessScope():
        for call in graph.calls:
            results = call(values, training=training)
            values |= {id(symbolic): result for symbolic, result in zip(call.outputs, results, strict=True)}
        filled = [_filled(values[id(symbolic)], recording.number_of_samples, output) for symbolic in graph.outputs]
        y_pred = graph.packed_outputs(filled)
        loss_parts(model, recording, x, y, y_pred, sample_weight, training=training)
    return recording.divisors


def _filled(tensor: tf.Tensor, samples: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns a tensor like an output of the batch, with its mask, whose elements are all `value`."""
    sizes = tensor.shape[1:]
    known = None not in sizes.as_list()
    filled = tf.fill([samples, *sizes] if known else tf.shape(tensor), tf.cast(value, tensor.dtype))
    filled.set_shape(tensor.shape)
    mask = get_mask(tensor)
    if mask is not None:
        set_mask(filled, mask)
    return filled
