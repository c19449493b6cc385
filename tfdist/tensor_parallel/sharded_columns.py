"""Columns of which neighbouring ones share a copy of the model: they hold parts of its split variables."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.keras_internals.placed_variables import held_variable, hold, identity_of, optimizers_of
from tfdist.keras_internals.updated_values import GATHERING
from tfdist.pipeline.columns import Columns, JointUpdate, MovedVariables, optimizer_variables
from tfdist.pipeline.stages import ModelStages
from tfdist.tensor_parallel.shard_layout import ShardLayout
from tfdist.tensor_parallel.sharded_stage import ShardedStageFunction
from tfdist.tensor_parallel.split_updates import update_by_gathering, update_by_lamb
from tfdist.tensor_parallel.split_variable import SplitVariable, part_shape
from tfdist.tensorflow_internals.placed_strategy import variable_like

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
        """Creates the columns.

        Args:
            devices: By column and stage.
            layout: Which variables neighbouring columns split.
        """
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
        optimizer = getattr(model, "optimizer", None)
        slots = optimizer_variables(optimizer) if optimizer is not None else []
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
        optimizer, _ = optimizers_of(model.optimizer)
        if type(optimizer) not in _OPTIMIZERS:
            raise ValueError(
                "An optimizer cannot update split variables, because its update of an element may depend on the "
                f"complete variable. Received: {type(optimizer).__name__} with a layout map; what it needs is not "
                f"known. Expected: one of {', '.join(one.__name__ for one in _OPTIMIZERS)}. Use one of them, or leave "
                "out `layout_map`."
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
