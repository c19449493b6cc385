"""The update of what a replica owns by a Keras optimizer: parts of variables, or whole variables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.keras_updates import is_of_each_variable, is_time_of_averages, moved_average
from tfdist.keras_internals.model_state import components
from tfdist.keras_internals.optimizers import LARGE_UPDATE, OptimizerUpdate, reduced_gradients
from tfdist.keras_internals.sharded_optimizers import SplitSlots
from tfdist.keras_internals.split_slot import SplitSlot, parts_of_replica
from tfdist.keras_internals.split_weight import SplitWeight
from tfdist.keras_internals.updated_values import UpdatedValue
from tfdist.tensorflow_internals.function_graphs import is_symbolic
from tfdist.tensorflow_internals.shared_operations import shared_operations
from tfdist.tensorflow_internals.strategy_extended import without_merge_calls
from tfdist.tensorflow_internals.tensorflow_symbols import FuncGraph
from tfdist.tensorflow_internals.xla_functions import call_compiled, compiles_on_cpus

Parts = Mapping[int, tf.Tensor]

_MOST_COMPUTATIONS = 16  # XLA takes 30 to 50 ms to compile one.
_READS = ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp")


class PartUpdate:
    """The update, by one optimizer, of the parts that one replica owns.

    Parts are flat tensors by the position of their variable in the optimizer's list; empty ones are left out.
    """

    def __init__(self, update: OptimizerUpdate, slots: SplitSlots, local_replica: int) -> None:
        """Updates the variables of `update` on a replica of this process."""
        self._optimizer = update.optimizer
        self._strategy = update.strategy
        self._local_replica = local_replica
        replica = slots.sharding.first + local_replica
        self._spans = [slots.layout.spans(position)[replica] for position in range(len(slots.layout.sizes))]
        self._sizes = slots.layout.sizes
        self._rounded = set(slots.exact_weights)
        exact_weights = [(position, exact) for position, exact in slots.exact_weights.items() if self._owns(position)]
        self._exact = {position: exact.parts[local_replica] for position, exact in exact_weights}
        units = [unit.positions for unit in slots.layout.units]
        number = min(len(units), _MOST_COMPUTATIONS)
        self._computations = {
            position: index * number // len(units) for index, unit in enumerate(units) for position in unit
        }
        #: The positions of the variables that have a gradient.
        self.positions = [self._optimizer._get_variable_index(variable) for variable in update.variables]
        present = set(self.positions)
        #: The positions of those of which the replica owns a part, in the order in which they are exchanged.
        self.owned = [position for unit in units for position in unit if position in present and self._owns(position)]

    @property
    def changed(self) -> list[int]:
        """The positions of the variables that the update may change."""
        overwrites = self._optimizer.use_ema and self._optimizer.ema_overwrite_frequency
        return list(range(len(self._sizes))) if overwrites else self.positions

    @property
    def accumulators(self) -> list[tf.Variable]:
        """The replica's parts of the sums of gradients of `owned`, if these are split."""
        split_accumulators = [self._optimizer._accumulated_gradients[position] for position in self.owned]
        return [accumulator.parts[self._local_replica] for accumulator in split_accumulators]

    @property
    def has_split_accumulators(self) -> bool:
        accumulators = self._optimizer._accumulated_gradients if self._optimizer.gradient_accumulation_steps else []
        return any(isinstance(accumulator, SplitSlot) for accumulator in accumulators)

    def apply(self, gradients: Parts, compiles: bool | None) -> dict[int, tf.Tensor]:
        """Decays and updates parts, and their moving averages; returns the new values of the parts of `changed`.

        Gradients are clipped. For `compiles` see `OptimizerUpdate.clip_and_apply`.
        """
        compiled = [position for position in gradients if self._is_compiled(position, gradients, compiles)]
        values = self._updated_by_xla(compiled, gradients)
        uncompiled = [position for position in gradients if position not in values]
        values.update(zip(uncompiled, self._updated(uncompiled, self._inputs(uncompiled, gradients)), strict=True))
        return self._average(values) if self._optimizer.use_ema else values

    def is_in_parts(self, position: int) -> bool:
        """Whether the replica holds a part of a variable, and no copy."""
        return isinstance(self._optimizer._trainable_variables[position], SplitWeight)

    def path(self, position: int) -> str:
        return str(self._optimizer._trainable_variables[position].path)

    def assign_parts(self, values: Parts) -> None:
        """Assigns the new values of parts that the replica holds."""
        for position, value in values.items():
            if self.is_in_parts(position):
                self._copy(position).assign(value)

    def assign(self, values: Parts) -> None:
        """Assigns whole values, flat, to the replica's copies of variables."""
        for position, value in values.items():
            variable = self._copy(position)
            variable.assign(tf.cast(tf.reshape(value, variable.shape), variable.dtype))

    def own_part(self, position: int) -> tf.Tensor:
        """Returns the present values of the replica's part of a variable; the exact ones if weights are rounded."""
        present = self._as_part(position, tf.convert_to_tensor(self._copy(position)))
        if position not in self._exact:
            return present
        exact = tf.convert_to_tensor(self._exact[position])
        return tf.where(tf.equal(tf.cast(tf.cast(exact, tf.bfloat16), exact.dtype), present), exact, present)

    def rounded(self, values: Parts) -> dict[int, tf.Tensor]:
        """Returns new values as they are sent, and keeps the exact ones if they are rounded."""
        for position, value in values.items():
            if position in self._exact:
                self._exact[position].assign(value)
        return {
            position: tf.cast(value, tf.bfloat16) if position in self._exact else value
            for position, value in values.items()
        }

    def sent_dtype(self, position: int) -> tf.DType:
        """The dtype in which new values of a variable are sent."""
        return tf.bfloat16 if position in self._rounded else self.dtype(position)

    def _as_part(self, position: int, value: tf.Tensor) -> tf.Tensor:
        """The replica's part of a value that it holds."""
        if self.is_in_parts(position):
            return value
        span = self._spans[position]
        return tf.reshape(value, [-1])[span.start : span.stop]

    def _owns(self, position: int) -> bool:
        return self._spans[position].stop > self._spans[position].start

    def rows(self, position: int) -> int | None:
        """The first dimension of a variable; `None` if it is a scalar."""
        shape = self._copy(position).shape
        return int(shape[0]) if shape.rank else None

    def dtype(self, position: int) -> tf.DType:
        return self._copy(position).dtype

    def _copy(self, position: int) -> tf.Variable:
        variable = self._optimizer._trainable_variables[position]
        if isinstance(variable, SplitWeight):
            return variable.parts[self._local_replica]
        return components(self._strategy, getattr(variable, "_value", variable))[self._local_replica]

    def _is_compiled(self, position: int, gradients: Parts, compiles: bool | None) -> bool:
        if compiles is False or not is_symbolic(gradients[position]):
            return False
        if compiles:
            return not self._optimizer.use_ema
        is_large = self._sizes[position] >= LARGE_UPDATE  # the whole variable, so that XLA rounds as without sharding
        return is_large and is_of_each_variable(self._optimizer) and compiles_on_cpus()

    def _inputs(self, positions: Sequence[int], gradients: Parts) -> list[tf.Tensor]:
        return [*(gradients[position] for position in positions), *(self.own_part(position) for position in positions)]

    def _updated_by_xla(self, positions: Sequence[int], gradients: Parts) -> dict[int, tf.Tensor]:
        """Updates by one computation for each unit, so that the first ones are gathered while others are computed."""
        new_values: dict[int, tf.Tensor] = {}
        by_kind: dict[tuple[int, tf.DType], list[int]] = {}
        for position in positions:
            by_kind.setdefault((self._computations[position], self.dtype(position)), []).append(position)
        for chosen in by_kind.values():

            def joined(*inputs: tf.Tensor, chosen: Sequence[int] = chosen) -> list[tf.Tensor]:
                return [tf.concat(self._updated(chosen, inputs), axis=0)]

            results = call_compiled(joined, self._inputs(chosen, gradients))
            if results is not None:
                sizes = [self._spans[position].stop - self._spans[position].start for position in chosen]
                new_values.update(zip(chosen, tf.split(results[0], sizes), strict=True))
        return new_values

    def _updated(self, positions: Sequence[int], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the new values of parts; changes their slots."""
        optimizer = self._optimizer
        gradients, values = inputs[: len(positions)], inputs[len(positions) :]
        parts = []
        with parts_of_replica(self._local_replica), shared_operations():
            rate = optimizer.learning_rate
            for position, gradient, value in zip(positions, gradients, values, strict=True):
                variable = optimizer._trainable_variables[position]
                variable = getattr(variable, "_value", variable)
                part = UpdatedValue(value, variable)
                if optimizer.weight_decay is not None and optimizer._use_weight_decay(variable):
                    decay = tf.cast(optimizer.weight_decay, part.dtype)
                    part.assign_sub(part.value * decay * tf.cast(rate, part.dtype))
                optimizer.update_step(gradient, part, rate)
                parts.append(part)
        return [part.value for part in parts]

    def _average(self, values: dict[int, tf.Tensor]) -> dict[int, tf.Tensor]:
        """Updates the moving averages of all variables; returns the values, or in due time the averages."""
        optimizer = self._optimizer
        averages: dict[int, tf.Variable] = {}
        for position, average in enumerate(optimizer._model_variables_moving_average):
            if average is None or not self._owns(position):
                continue
            value = values[position] if position in values else self.own_part(position)
            part = averages[position] = average.parts[self._local_replica]
            part.assign(moved_average(optimizer, part, value))
        if not optimizer.ema_overwrite_frequency:
            return values
        positions = list(averages)
        present = [values[place] if place in values else self.own_part(place) for place in positions]
        chosen = tf.cond(
            is_time_of_averages(optimizer),
            lambda: [tf.convert_to_tensor(averages[position]) for position in positions],
            lambda: present,
        )
        return dict(zip(positions, chosen, strict=True))


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
        written = _watched(_shared_state(optimizer))
        with parts_of_replica(self._local_replica), reduced_gradients(), without_merge_calls():
            optimizer._apply_weight_decay(variables)
            optimizer._backend_update_step(list(gradients), variables, optimizer.learning_rate)
        if names := written():
            raise ValueError(
                "An optimizer whose state is sharded updates each variable on one replica. Received: an update by "
                f"{type(optimizer).__name__} that changes {names[0]!r}, which belongs to no variable, so that "
                "it would differ between replicas. Expected: `update_step` changes the variable and slots from "
                "`add_variable_from_reference` or `add_optimizer_variables`. Create the strategy without "
                "`shard_optimizer_state`."
            )


def _shared_state(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer that are not slots, except one that Keras changes equally everywhere."""
    equal_everywhere = getattr(optimizer, "_u_product", None)
    return [
        candidate.value if isinstance(candidate, keras.Variable) else candidate
        for candidate in (*optimizer._variables, *vars(optimizer).values())
        if isinstance(candidate, keras.Variable | tf.Variable)
        and not isinstance(candidate, SplitSlot)
        and candidate is not equal_everywhere
    ]


def _watched(variables: Sequence[Any]) -> Callable[[], list[str]]:
    """Returns a function that returns the names of those of some variables, which are small, that were changed since.

    In a graph by the operations that have been added to it and take a variable but do not read it, eagerly by the
    values of the variables, which may be distributed.
    """
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, FuncGraph):
        pairs = [(variable, variable.numpy()) for variable in variables]
        return lambda: [
            variable.name for variable, before in pairs if not np.array_equal(variable.numpy(), before, equal_nan=True)
        ]
    first = len(graph.get_operations())

    def written() -> list[str]:
        names = {id(part.handle): variable.name for variable in variables for part in _parts(variable)}
        writers = [operation for operation in graph.get_operations()[first:] if operation.type not in _READS]
        used = {id(tensor) for writer in writers for tensor in writer.inputs}
        handles = [_outermost(held, graph.outer_graph) for held, inner in graph.captures if id(inner) in used]
        return [names[id(handle)] for handle in handles if id(handle) in names]

    return written


def _parts(variable: Any) -> Sequence[Any]:
    return variable.values if isinstance(variable, tf.distribute.DistributedValues) else [variable]


def _outermost(held: Any, graph: Any) -> Any:
    """Returns the tensor of the program that a resource stands for which a function has captured."""
    while isinstance(graph, FuncGraph):
        outer = next((known for known, placeholder in graph.captures if placeholder is held), None)
        if outer is None:
            break
        held, graph = outer, graph.outer_graph
    return held
