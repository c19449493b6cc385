"""The divisors of the losses of a batch, other than its number of samples: from masks, targets and weights alone."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import loss_parts
from tfdist.keras_internals.functional_graph import FunctionalGraph
from tfdist.model_parallel.micro_batch_loss import DivisorRecording
from tfdist.model_parallel.stage_functions import StageKind
from tfdist.tensorflow_internals.pruned_function import PrunedFunction


def divisors_of(model: Any, graph: FunctionalGraph, batch: Any, kind: StageKind, number: int) -> tf.Tensor:
    """Returns the divisors of a batch, a float32 vector, in the order in which the losses use them.

    The model is traced on the complete batch, and the trace is pruned to what the divisors need. For the mask of an
    `Embedding` that is the comparison of ids with zero.

    Args:
        model: The compiled model.
        graph: Its graph.
        batch: The inputs as the graph has them, and inputs, targets and weights for the losses.
        kind: Which functions of stages need them.
        number: How many divisors a micro-batch has.

    Raises:
        ValueError: A divisor depends on the model's weights.
    """
    given = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]

    def of_batch(*leaves: tf.Tensor) -> tf.Tensor:
        waiting = iter(leaves)
        data = tf.nest.map_structure(lambda leaf: None if leaf is None else next(waiting), batch)
        return tf.stack(_recorded(model, graph, data, kind))

    traced = tf.function(of_batch, autograph=False)
    with tf.init_scope(), tf.device(None):
        concrete = traced.get_concrete_function(*[tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) for leaf in given])
        pruned = PrunedFunction(concrete)
    if concrete.outputs[0].shape[0] != number or pruned.reads:
        raise ValueError(
            "A loss divides by a value that is not known before the predictions. Received: a divisor other than the "
            "number of samples that depends on the model's weights, or on the number of micro-batches. Expected: a "
            "loss that divides by the number of samples, by a sum of sample weights, or by the number of valid entries "
            "of a mask of inputs or targets."
        )
    return pruned(*given)


def _recorded(model: Any, graph: FunctionalGraph, data: Any, kind: StageKind) -> list[tf.Tensor]:
    inputs, (x, y, sample_weight) = data
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    recording = DivisorRecording(tf.shape(leaves[0])[0])
    values = {id(symbolic): tensor for symbolic, tensor in zip(graph.inputs, inputs, strict=True)}
    with recording.running(leaves), keras.StatelessScope():
        for call in graph.calls:
            results = call(values, training=kind.training)
            values |= {id(symbolic): result for symbolic, result in zip(call.outputs, results, strict=True)}
        y_pred = graph.packed_outputs([values[id(tensor)] for tensor in graph.outputs])
        loss_parts(model, recording, x, y, y_pred, sample_weight, training=kind.training)
    return recording.divisors
