"""Columns of which neighbouring ones share a copy of the model: they hold parts of its split variables.

The step of some optimizers for an element depends on the complete variable:

Adafactor and Muon: each device gathers the gradient, and of the variable and its slots what Keras' own `update_step`
reads; it computes the update of the complete variable, and keeps its part. So the bits are those of one process that
has the same gradients.

Lamb: the step depends on norms of a complete variable and of its update. Keras' own `update_step` computes the parts of
the update: for a weight of zeros and a learning rate of one it subtracts the update itself. Only the squares of the two
norms leave a device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_updates import decay_weights
from tfdist.keras_internals.placed_variables import held_variable, hold, holding, identity_of, optimizer_and_loss_scale
from tfdist.keras_internals.updated_values import GATHERING, UpdatedValue, slots_of, update_step, updates_elements
from tfdist.pipeline.columns import Columns, JointUpdate, MovedVariables, optimizer_variables
from tfdist.pipeline.stages import ModelStages
from tfdist.pipeline.transfers import DENSE, WEIGHT, WEIGHT_GRADIENT, record_transfer
from tfdist.pipeline.update import SeparateFunctions, finish_update
from tfdist.tensor_parallel.sharded_stage import ShardedStageFunction
from tfdist.tensor_parallel.split_variable import ShardLayout, SplitVariable, part_shape
from tfdist.tensorflow_internals.placed_strategy import variable_like


def update_by_gathering(
    optimizer: Any, variables: Sequence[keras.Variable], gradients: Sequence[Sequence[Any]], columns: Columns
) -> None:
    """Decays and updates split variables, applies their constraints, and updates their moving averages.

    The optimizer is one of `GATHERING`, without its loss scale. `gradients` are clipped, by column and variable.
    """
    separate = SeparateFunctions(optimizer)
    for variable, of_columns in zip(variables, zip(*gradients, strict=True), strict=True):
        slots = slots_of(optimizer, variable)
        state = [variable, *(slot for slot in slots if isinstance(held_variable(slot), SplitVariable))]
        # All are read before the first of them changes.
        read = [_read_parts(of_state) for of_state in state]
        for column, device in enumerate(columns.devices_of(variable)):
            with columns.entered(column), tf.device(device):
                _update_in_column(optimizer, state, read, of_columns, column, columns.ways, separate)


def _read_parts(variable: keras.Variable) -> tuple[SplitVariable, list[tf.Tensor]]:
    held, parts = held_variable(variable), []
    for shard in held.shards:
        with tf.device(shard.device):
            parts.append(shard.read_value())
    return held, parts


def _update_in_column(
    optimizer: Any,
    state: Sequence[keras.Variable],
    read: Sequence[tuple[SplitVariable, list[tf.Tensor]]],
    gradients: Any,
    column: int,
    ways: int,
    separate: SeparateFunctions,
) -> None:
    """Updates a variable, the first of the `state`, in a column whose parts of variables are entered.

    It does so by a function that TensorFlow optimizes by itself, so that all columns round equally.
    """
    is_alone, first = updates_elements(optimizer, state[0]), column - column % ways
    group = slice(first, first + ways)
    values, device = [], held_variable(state[0]).device
    for variable, (held, parts) in zip(state, read, strict=True):
        value = parts[column] if is_alone else held.joined(parts[group])
        values.append(UpdatedValue(value, held_variable(variable), variable.path))
    gradient = gradients[column] if is_alone else _joined_gradient(gradients[group], read[0][0])

    def update() -> None:
        weights, *slots = values
        held_by = {id(slot): (slot, value) for slot, value in zip(state[1:], slots, strict=True)}
        own_parts = [held_variable(variable) for variable in state]
        with holding(held_by):
            update_step(optimizer, gradient, weights)
        for part, value, (held, _) in zip(own_parts, values, read, strict=True):
            if value.is_written:
                part.assign(value.value if is_alone else held.part_of(value.value, column))
        finish_update(optimizer, [state[0]])

    separate(update)
    if not is_alone:
        for kind in (WEIGHT_GRADIENT, DENSE):
            record_transfer(kind, gradients[group], device)
        for value, (_, parts) in zip(values, read, strict=True):
            record_transfer(WEIGHT, parts[group] if value.is_read else [], device)


def _joined_gradient(parts: Sequence[Any], held: SplitVariable) -> Any:
    """Returns the gradient of a complete variable; rows, if all parts are rows."""
    if not all(isinstance(part, tf.IndexedSlices) for part in parts):
        return held.joined([tf.convert_to_tensor(part) for part in parts])
    values, indices = [part.values for part in parts], [part.indices for part in parts]
    shape = tf.constant(held.shape.as_list(), tf.int64)
    if held.axis > 0:  # the same rows on all devices
        return tf.IndexedSlices(tf.concat(values, held.axis), indices[0], shape)
    rows = [of_part + tf.cast(held.bounds(index)[0], of_part.dtype) for index, of_part in enumerate(indices)]
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(rows, 0), shape)


def update_by_lamb(
    optimizer: Any, variables: Sequence[keras.Variable], gradients: Sequence[Sequence[Any]], columns: Columns
) -> None:
    """Does what `update_by_gathering` does, for a `keras.optimizers.Lamb`."""
    separate = SeparateFunctions(optimizer)
    for variable, of_columns in zip(variables, zip(*gradients, strict=True), strict=True):
        update_part = functools.partial(_update_of_part, optimizer, variable)
        apply = functools.partial(_apply, optimizer, variable)
        devices, parts = columns.devices_of(variable), []
        for column, (gradient, device) in enumerate(zip(of_columns, devices, strict=True)):
            with columns.entered(column), tf.device(device):
                parts.append(separate(update_part, gradient))
        for column, device in enumerate(devices):
            first = column - column % columns.ways
            of_column = parts[first : first + columns.ways]
            norms = [tf.sqrt(tf.add_n([part[index] for part in of_column])) for index in (1, 2)]
            with columns.entered(column), tf.device(device):
                separate(apply, parts[column][0], norms)


def _update_of_part(optimizer: Any, variable: keras.Variable, gradient: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the part of the update, and the squares of the norms of the part's weights and of the update."""
    held = held_variable(variable)
    part = UpdatedValue(tf.zeros(held.shape, held.dtype), held)
    decay_weights(optimizer, [held])
    optimizer.update_step(gradient, part, 1.0)
    update = -part.value
    return update, tf.reduce_sum(tf.square(held.read_value())), tf.reduce_sum(tf.square(update))


def _apply(optimizer: Any, variable: keras.Variable, update: tf.Tensor, norms: list[tf.Tensor]) -> None:
    held, (of_weights, of_update) = held_variable(variable), norms
    is_known = (of_weights > 0) & (of_update > 0)
    ratio = tf.where(is_known, of_weights / tf.where(is_known, of_update, 1), 1)
    held.assign_sub(ratio * tf.cast(optimizer.learning_rate, held.dtype) * update)
    finish_update(optimizer, [variable])


_OPTIMIZERS = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adamax),
    *(keras.optimizers.Nadam, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta),
    *(keras.optimizers.Ftrl, keras.optimizers.Lion, keras.optimizers.Lamb),
    *GATHERING,
)
_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class ShardedColumns(Columns):
    """See `Columns`; `layout.ways` neighbouring columns share a copy."""

    def __init__(self, devices: Sequence[Sequence[str]], layout: ShardLayout) -> None:
        super().__init__(devices)
        self.ways, self._layout = layout.ways, layout
        self._weight_of_slot: dict[str, str] = {}  # of slots that are not split yet, by their ids

    def place(self, model: Any, stages: ModelStages, chief: str, colocated_with: dict[str, str]) -> None:
        """See `Columns`."""
        self._weight_of_slot = dict(colocated_with)
        self._move_parts(model, stages)
        super().place(model, stages, chief, colocated_with)

    def _move_parts(self, model: Any, stages: ModelStages) -> None:
        """Moves variables that were created in parts, and their slots, to the devices of their stages."""
        calls = [call for stage in stages.stages for call in stage.calls]  # not what only the loss uses
        self.axes = self._layout.axes_of(variable for call in calls for variable in call.variables)
        self._layout.warn_of_unused_keys()
        moved, stage_of = MovedVariables(), {}
        for variable in stages.variables:
            weight = identity_of(held_variable(variable))
            stage_of[weight] = stages.owner[id(variable)] if id(variable) in self.axes else None
            self._place(variable, stage_of[weight], moved)
        for slot, weight in self._slots(model):
            self._place(slot, stage_of.get(weight), moved)
        moved.warn_if_used()

    def _slots(self, model: Any) -> list[tuple[Any, str]]:
        """Returns the variables of the optimizer, each with the id of its weight if it is a new slot."""
        slots = optimizer_variables(model)
        return [(slot, self._weight_of_slot.get(identity_of(held_variable(slot)), "")) for slot in slots]

    def _place(self, variable: Any, stage: int | None, moved: MovedVariables) -> None:
        held = held_variable(variable)
        if not isinstance(held, SplitVariable) or held.is_placed:
            return
        if stage is None:  # no layer of a stage uses it: it is complete, as others
            moved.add(variable, *held.shards)
            hold(variable, variable_like(held, held.device))
        else:
            moved.add(variable, *held.place(self._groups(stage)))

    def _copy(self, model: Any, stages: ModelStages) -> None:
        to_split = [variable for variable in stages.variables if id(variable) in self.axes]
        split = {identity_of(held_variable(variable)): variable for variable in to_split}
        for variable in split.values():
            self._split(variable, self.axes[id(variable)])
        for slot, weight in self._slots(model):
            beside = split.get(weight)
            if beside is not None and tuple(slot.shape) == tuple(beside.shape):
                self._split(slot, self.axes[id(beside)], is_slot=True)
        super()._copy(model, stages)

    def _split(self, variable: Any, axis: int, *, is_slot: bool = False) -> None:
        held = held_variable(variable)
        if isinstance(held, SplitVariable):
            return
        groups = self._groups(self.devices[0].index(held.device))
        hold(variable, SplitVariable(held, axis, groups, is_slot=is_slot))

    def _groups(self, stage: int) -> list[list[str]]:
        of_stage = [devices[stage] for devices in self.devices]
        return [of_stage[first : first + self.ways] for first in range(0, len(of_stage), self.ways)]

    def check(self, model: Any, step: str) -> None:
        """Raises an error if a step would compute something else on parts of variables than on complete ones."""
        if step != "train_step" or not self.axes:
            return
        optimizer, _ = optimizer_and_loss_scale(model.optimizer)
        if type(optimizer) not in _OPTIMIZERS:
            raise ValueError(
                "An optimizer cannot update split variables, because its update of an element may depend on the "
                f"complete variable. Received: {type(optimizer).__name__} with a layout map; what it needs is not "
                f"known. Expected: one of {', '.join(kind.__name__ for kind in _OPTIMIZERS)}. Use one of them, or "
                "leave out `layout_map`."
            )
        for variable in model.trainable_variables:
            if id(variable) not in self.axes:
                continue
            regularizer, constraint = getattr(variable, "regularizer", None), getattr(variable, "constraint", None)
            is_elementwise = constraint is None or type(constraint) is keras.constraints.NonNeg
            if not is_elementwise or not (regularizer is None or type(regularizer) in _REGULARIZERS):
                of_all = regularizer if is_elementwise else constraint
                raise ValueError(
                    "A split variable has a regularizer or constraint that needs all of it. Received: "
                    f"{type(of_all).__name__} of {variable.path!r}. Expected: the regularizers L1, L2 and L1L2 and the "
                    "constraint NonNeg. Exclude this path from the layout map, or replace them."
                )

    @property
    def stage_function(self) -> Callable[..., ShardedStageFunction]:
        """See `Columns`."""
        return functools.partial(ShardedStageFunction, axes=self.axes, ways=self.ways)

    def joint_update(self, optimizer: Any) -> JointUpdate | None:
        """See `Columns`."""
        if isinstance(optimizer, keras.optimizers.Lamb):
            return update_by_lamb
        return update_by_gathering if isinstance(optimizer, GATHERING) else None

    def shape_of_part(self, variable: keras.Variable) -> tuple[int, ...]:
        """See `Columns`."""
        return part_shape(variable.shape, self.axes.get(id(variable)), self.ways)
