"""The layers of a model that is a graph, with their measured times."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.functional_graph import FunctionalGraph, graph_of
from tfdist.model_parallel.layer_costs import elements_of, estimated_cost, measured_costs
from tfdist.model_parallel.unsupported_models import check_model_for_stages
from tfdist.planning.measurements import LayerMeasurement

_MAX_MEASURED = 24  # each takes about 0.15 s to trace


def graph_of_stages(model: Any, strategy: Any, x: Any) -> FunctionalGraph | None:
    """Returns the graph of a model that `ModelParallelStrategy` can cut into stages, or None."""
    compiled, model.jit_compile = model.jit_compile, False
    try:
        with tf.Graph().as_default():  # the check is that of a step that is traced
            check_model_for_stages(model, strategy, "train_step")
        return graph_of(model, x)
    except Exception:  # the reason is one that the strategy gives when it is used
        return None
    finally:
        model.jit_compile = compiled


def layer_table(
    graph: FunctionalGraph, x: Any, step_seconds: float, *, may_measure: bool = True
) -> tuple[LayerMeasurement, ...]:
    """Returns the layer calls of a graph.

    Args:
        graph: The graph.
        x: The inputs of a batch, tensors.
        step_seconds: The time of the forward and backward passes, which is split by estimates if there are many calls
            or recurrent layers, whose gradients take 10 s to trace alone.
        may_measure: Whether there is time to measure each layer.
    """
    estimates = [float(estimated_cost(call)) for call in graph.calls]
    scale = step_seconds / (sum(estimates) or 1.0)
    seconds = {call.name: estimate * scale for call, estimate in zip(graph.calls, estimates, strict=True)}
    recurrent = any(isinstance(call.operation, keras.layers.RNN) for call in graph.calls)
    if may_measure and not recurrent and len(graph.calls) <= _MAX_MEASURED:
        seconds = measured_costs(graph, x, "/device:CPU:0")
    counted: set[int] = set()
    return tuple(
        LayerMeasurement(call.name, seconds[call.name], _parameters(call.variables, counted), _bytes(call.outputs))
        for call in graph.calls
    )


def _parameters(variables: Sequence[Any], counted: set[int]) -> int:
    """Counts the trainable weights that no earlier call has."""
    own = [one for one in variables if one.trainable and id(one) not in counted]
    counted.update(map(id, own))
    return sum(tf.TensorShape(one.shape).num_elements() or 0 for one in own)


def _bytes(outputs: Sequence[Any]) -> int:
    dtypes = [tf.as_dtype(keras.backend.standardize_dtype(tensor.dtype)) for tensor in outputs]
    return sum(elements_of(tensor) * dtype.size for tensor, dtype in zip(outputs, dtypes, strict=True))
