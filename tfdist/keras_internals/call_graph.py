"""The graph of the calls that one call of a model makes: of a Functional or Sequential one, or traced."""

from dataclasses import dataclass
from typing import Any

import keras

from tfdist.keras_internals.layer_calls import LayerCall, signature_of
from tfdist.private_symbols import private

Functional = private("keras.src.models.functional:Functional", "its graph of layers is cut into stages")
private("keras.src.ops.function:Function._run_through_graph", "the order of the calls, which is repeated here")


class DifferentInTraining(ValueError):
    """The call of a model computes something else in training than in testing."""


@dataclass(frozen=True)
class CallGraph:
    """The calls between symbolic inputs and outputs.

    Attributes:
        function: The `keras.Function`, such as a Functional model.
        trainings: The value of `training` that the code fixes for each of the `nodes`; None for that of the model.
    """

    function: Any
    trainings: tuple[bool | None, ...]

    @property
    def nodes(self) -> list[Any]:
        """Keras' nodes, in an order in which they can be computed."""
        return _nodes(self.function)

    @property
    def variables(self) -> list[keras.Variable]:
        """Variables among the arguments of calls."""
        leaves = [keras.tree.flatten((node.arguments.args, node.arguments.kwargs)) for node in self.nodes]
        return [leaf for of_node in leaves for leaf in of_node if isinstance(leaf, keras.Variable)]


def own_graph(model: Any) -> CallGraph | None:
    """Returns the graph of a Functional or built Sequential model; None for other models."""
    model_class, function = type(model), None
    if isinstance(model, keras.Sequential) and model_class.call is keras.Sequential.call:
        function = model._functional
    elif isinstance(model, Functional) and model_class.call is Functional.call:
        function = model
    return None if not function else CallGraph(function, (None,) * len(_nodes(function)))


def traced_graph(model: Any, inputs: Any, **kwargs: Any) -> CallGraph:
    """Returns the graph of the `call` of a model, which is traced with symbolic tensors.

    `kwargs` are other arguments of `call`, without `training`.

    Raises:
        DifferentInTraining: What is computed depends on `training`, other than as an argument of layers.
        Exception: Whatever `call` raises for symbolic tensors.
    """
    functions = []
    for training in (True, False):
        symbolic_inputs = keras.tree.map_structure(
            lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype, name=leaf.name), inputs
        )
        has_training = {"training": training} if model._call_has_training_arg else {}
        functions.append(keras.Function(symbolic_inputs, model.call(symbolic_inputs, **kwargs, **has_training)))
    in_training, in_testing = functions
    if _signature(in_training) != _signature(in_testing):
        raise DifferentInTraining(f"the graphs of {model.name!r} differ")
    pairs = zip(_nodes(in_training), _nodes(in_testing), strict=True)
    return CallGraph(in_training, tuple(_fixed_training(*pair) for pair in pairs))


def _nodes(function: Any) -> list[Any]:
    by_depth = function._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def _signature(function: Any) -> list[Any]:
    calls = [
        LayerCall(node.operation, node.arguments.args, node.arguments.kwargs, tuple(node.outputs))
        for node in _nodes(function)
    ]
    return signature_of(function.inputs, calls, function.outputs)


def _fixed_training(in_training: Any, in_testing: Any) -> bool | None:
    """Returns the value of `training` of a call, if it is the same in training and in testing."""
    values = [node.arguments.kwargs.get("training") for node in (in_training, in_testing)]
    if values[0] is not None and values[0] == values[1]:
        return bool(values[0])
    if values not in ([None, None], [True, False]):
        raise DifferentInTraining(f"a call of {in_training.operation.name!r} has training={values[0]} in training")
    return None
