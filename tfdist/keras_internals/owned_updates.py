"""The update of whole variables by the replica that owns them, for optimizers that cannot update parts of variables."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.optimizers import reduced_gradients
from tfdist.keras_internals.part_updates import Parts, PartUpdate
from tfdist.keras_internals.split_slot import SplitSlot, parts_of_replica
from tfdist.tensorflow_internals.strategy_extended import without_merge_calls
from tfdist.tensorflow_internals.tensorflow_symbols import FuncGraph
from tfdist.tensorflow_internals.xla_functions import call_compiled

_READS = ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp")


class OwnedUpdate(PartUpdate):
    """The update, by the optimizer's own methods, of the variables that one replica owns."""

    def apply(self, gradients: Parts, compiles: bool | None) -> dict[int, tf.Tensor]:
        """Decays and updates the variables that the replica owns; see `PartUpdate.apply`. Values have whole shapes."""
        positions = list(gradients)
        shapes = [self._copy(position).shape for position in positions]
        shaped = [tf.reshape(gradients[position], shape) for position, shape in zip(positions, shapes, strict=True)]
        is_compiled = bool(compiles) and not self._optimizer.use_ema and bool(shaped)

        for position in positions:
            if position in self._exact:
                self._copy(position).assign(self.own_part(position))

        def update(*inputs: tf.Tensor) -> list[tf.Tensor]:
            self._update_variables(positions, inputs)
            return []

        if not is_compiled or call_compiled(update, shaped) is None:
            update(*shaped)
        values = {position: tf.convert_to_tensor(self._copy(position)) for position in positions}
        return self._average(values) if self._optimizer.use_ema else values

    def _as_part(self, position: int, value: tf.Tensor) -> tf.Tensor:
        return value

    def _update_variables(self, positions: Sequence[int], gradients: Sequence[tf.Tensor]) -> None:
        """Calls the optimizer on each replica, also if it owns none, because Nadam counts in each update."""
        optimizer = self._optimizer
        variables = [optimizer._trainable_variables[position] for position in positions]
        written = _WrittenVariables(_shared_state(optimizer))
        with parts_of_replica(self._local_replica), reduced_gradients(), without_merge_calls():
            optimizer._apply_weight_decay(variables)
            optimizer._backend_update_step(list(gradients), variables, optimizer.learning_rate)
        if written.find():
            raise ValueError(
                "An optimizer whose state is sharded updates each variable on one replica. Received: an update by "
                f"{type(optimizer).__name__} that changes {written.find()[0]!r}, which belongs to no variable, so that "
                "it would differ between replicas. Expected: `update_step` changes the variable and slots from "
                "`add_variable_from_reference` or `add_optimizer_variables`. Create the strategy without "
                "`shard_optimizer_state`."
            )


def _shared_state(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer that are not slots, except one that Keras changes equally everywhere."""
    equal_variables = [getattr(optimizer, "_u_product", None)]
    candidates = [*optimizer._variables, *(value for value in vars(optimizer).values())]
    return [
        candidate.value if isinstance(candidate, keras.Variable) else candidate
        for candidate in candidates
        if isinstance(candidate, keras.Variable | tf.Variable)
        and not isinstance(candidate, SplitSlot)
        and not any(candidate is equal_variable for equal_variable in equal_variables)
    ]


class _WrittenVariables:
    """Finds those of some variables that operations change from the creation of this object on.

    In a graph by the operations that have been added to it and take a variable but do not read it, eagerly by the
    values of the variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """Watches variables, also distributed ones, which are few and small."""
        self._variables = list(variables)
        self._graph = tf.compat.v1.get_default_graph()
        self._operations = 0 if tf.executing_eagerly() else len(self._graph.get_operations())
        self._values = [variable.numpy() for variable in self._variables] if tf.executing_eagerly() else []

    def find(self) -> list[str]:
        """Returns the names of the variables that were changed."""
        if not isinstance(self._graph, FuncGraph):
            pairs = zip(self._variables, self._values, strict=True)
            return [one.name for one, value in pairs if not np.array_equal(one.numpy(), value, equal_nan=True)]
        handles = {id(part.handle): one.name for one in self._variables for part in _parts(one)}
        new = self._graph.get_operations()[self._operations :]
        inputs = {id(tensor) for one in new if one.type not in _READS for tensor in one.inputs}
        written = []
        for inner, outer in _captures(self._graph):
            if id(inner) in inputs and id(outer) in handles:
                written.append(handles[id(outer)])
        return written


def _parts(variable: Any) -> Sequence[Any]:
    return variable.values if isinstance(variable, tf.distribute.DistributedValues) else [variable]


def _captures(graph: Any) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The placeholders of a function's graph for resources, each with the tensor of the program that it stands for."""
    return [(inner, _outermost(held, graph.outer_graph)) for held, inner in graph.captures]


def _outermost(held: Any, graph: Any) -> Any:
    while isinstance(graph, FuncGraph):
        outer = next((known for known, placeholder in graph.captures if placeholder is held), None)
        if outer is None:
            break
        held, graph = outer, graph.outer_graph
    return held
