"""The traced functions of the stages for one kind of step, and the divisors of its losses."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import loss_parts
from tfdist.keras_internals.functional_graph import FunctionalGraph
from tfdist.keras_internals.keras_symbols import get_mask, set_mask
from tfdist.model_parallel.micro_batch_loss import DivisorRecording
from tfdist.model_parallel.stage_functions import StageFunction, StageInputs, StageKind
from tfdist.model_parallel.stages import ModelStages
from tfdist.tensorflow_internals.pruned_function import PrunedFunction


class StepFunctions:
    """The functions of all stages. Each is traced when the first micro-batch reaches its stage.

    Attributes:
        stages: The stages.
    """

    def __init__(
        self,
        model: Any,
        stages: ModelStages,
        kind: StageKind,
        batch: Any,
        chief: str,
        trace: Callable[..., Any] = StageFunction,
    ) -> None:
        """Prepares a step.

        Args:
            model: The Keras model.
            stages: Its stages.
            kind: Which functions are traced.
            batch: Of the complete batch the inputs as the graph has them, and inputs, targets and weights for losses.
            chief: The device of the divisors.
            trace: Creates the function of a stage, as `StageFunction` does.
        """
        self.stages = stages
        self._model, self._kind, self._batch, self._chief = model, kind, batch, chief
        self._trace = trace
        self._functions: dict[int, Any] = {}
        self._divisors: tf.Tensor | None = None

    def of(self, index: int, given: StageInputs) -> tuple[Any, StageInputs]:
        """Returns the function of a stage, and its arguments `given` with the divisors of the losses."""
        function = self._functions.get(index)
        if function is None:
            function = self._trace(self._model, self.stages, self.stages.stages[index], self._kind, given)
            self._functions[index] = function
            if function.num_divisors:
                with tf.control_dependencies(None), tf.device(self._chief):
                    number = function.num_divisors
                    self._divisors = divisors_of(self._model, self.stages.graph, self._batch, self._kind, number)
        return function, given._replace(divisors=self._divisors) if function.num_divisors else given


def divisors_of(model: Any, graph: FunctionalGraph, batch: Any, kind: StageKind, number: int) -> tf.Tensor:
    """Returns the divisors of a batch, a float32 vector, in the order in which the losses use them.

    The model is traced on the complete batch, and the trace is pruned to what the divisors need. For the mask of an
    `Embedding` that is the comparison of ids with zero. The losses get tensors of one number in place of the outputs,
    with their shapes and masks: a divisor may depend on the shape of an output, as that of `ignore_class` does.

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

    def of_batch(output: tf.Tensor, *leaves: tf.Tensor) -> tf.Tensor:
        waiting = iter(leaves)
        data = tf.nest.map_structure(lambda leaf: None if leaf is None else next(waiting), batch)
        return tf.stack(_recorded(model, graph, data, kind, output))

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


def _recorded(model: Any, graph: FunctionalGraph, data: Any, kind: StageKind, output: tf.Tensor) -> list[tf.Tensor]:
    inputs, (x, y, sample_weight) = data
    leaves = [leaf for leaf in tf.nest.flatten(data) if leaf is not None]
    recording = DivisorRecording(tf.shape(leaves[0])[0])
    values = {id(symbolic): tensor for symbolic, tensor in zip(graph.inputs, inputs, strict=True)}
    with recording.running(leaves), keras.StatelessScope():
        for call in graph.calls:
            results = call(values, training=kind.training)
            values |= {id(symbolic): result for symbolic, result in zip(call.outputs, results, strict=True)}
        filled = [_filled(values[id(one)], recording.number_of_samples, output) for one in graph.outputs]
        y_pred = graph.packed_outputs(filled)
        loss_parts(model, recording, x, y, y_pred, sample_weight, training=kind.training)
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
