"""The graph of a Keras model: the calls of its layers in their order, also of a subclassed model."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.call_graph import CallGraph, DifferentInTraining, own_graph, traced_graph
from tfdist.keras_internals.layer_calls import signature_of
from tfdist.keras_internals.nested_models import flattened
from tfdist.private_symbols import private

_unpack_singleton = private("keras.src.models.functional:unpack_singleton", "the result of a model with one output")
private("keras.src.models.functional:Functional._standardize_inputs", "matches the data with the inputs of the graph")


class FunctionalGraph:
    """The layer calls between the inputs and the outputs of a model, also of the layers of nested models.

    Attributes:
        calls: The calls, in an order in which they can be computed.
        inputs: The symbolic inputs.
        outputs: The symbolic outputs.
    """

    def __init__(self, graph: CallGraph, standardize: Callable[[Any], list[Any]]) -> None:
        """Creates the graph; `standardize` returns a batch's inputs, tensors, in the order of the graph's inputs."""
        self._graph = graph  # keeps the symbolic tensors alive, whose ids are used
        self.inputs: Sequence[Any] = list(graph.function.inputs)
        self.calls, outputs = flattened(graph, self.inputs)
        self.outputs: Sequence[Any] = outputs
        self._standardize = standardize

    def flat_inputs(self, x: Any) -> list[tf.Tensor]:
        """Returns the tensors of the data `x` in the order of `inputs`, with their dtypes and ranks."""
        return self._standardize(x)

    def packed_outputs(self, outputs: Sequence[Any]) -> Any:
        """Returns the structure that a call of the model returns."""
        return _unpack_singleton(keras.tree.pack_sequence_as(self._graph.function._outputs_struct, list(outputs)))

    def signature(self) -> list[Any]:
        """Returns what is computed, to compare two graphs of the same model."""
        return signature_of(self.inputs, self.calls, self.outputs)


def graph_of(model: Any, x: Any = None) -> FunctionalGraph:
    """Returns the graph of a model; traces the `call` of a subclassed one.

    A built Functional or Sequential model needs no `x`, which are inputs, tensors or tensor specs.

    Raises:
        ValueError: The model has no graph; the message gives the reason.
    """
    if isinstance(model, keras.Sequential) and not model._functional and hasattr(x, "shape"):
        model.build(tuple(_batch_shape(x)))
    graph = own_graph(model)
    if graph is not None:
        return FunctionalGraph(graph, graph.function._standardize_inputs)
    if x is None:
        raise ValueError(
            f"The graph of a subclassed model is known from its first batch on. Received: {type(model).__name__} "
            f"{model.name!r} before any batch. Expected: a model that was fitted, evaluated or predicted with before."
        )
    return _traced(model, x)


def _traced(model: Any, x: Any) -> FunctionalGraph:
    inputs = keras.tree.map_structure(lambda leaf: keras.KerasTensor(_batch_shape(leaf), leaf.dtype.name), x)
    try:
        graph = traced_graph(model, inputs)
    except DifferentInTraining as error:
        raise ValueError(
            "The `call` of a subclassed model does not compute the same in training and testing. Received: "
            f"{type(model).__name__} {model.name!r}, as {error}. Expected: a `call` that uses `training` only "
            "as an argument of layers. Move the difference into a layer."
        ) from error
    except Exception as error:
        raise ValueError(
            f"The call of a subclassed model cannot be cut into stages, because it is not a graph of layers. Received: "
            f"{type(model).__name__} {model.name!r}, whose `call` failed with symbolic tensors: "
            f"{type(error).__name__}: {error}. Expected: a `call` of layers and of functions of `keras.ops` on its "
            "inputs. Move other code into layers."
        ) from error

    def standardize(data: Any) -> list[Any]:
        return [_converted(model, leaf) for leaf in keras.tree.flatten(data)]

    return FunctionalGraph(graph, standardize)


def _converted(model: Any, leaf: Any) -> Any:
    return model.dtype_policy.convert_input(leaf, model.autocast, model.input_dtype)


def _batch_shape(leaf: Any) -> list[int | None]:
    return [None, *leaf.shape[1:]]
