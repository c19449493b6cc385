"""Columns of stages: their devices have copies of the model, or parts of variables that neighbouring columns share."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from tfdist.keras_internals.placed_variables import compiled_optimizer, held_variable, hold, holding, identity_of
from tfdist.pipeline.placement import MovedVariables, copied_variables, copy_to, optimizer_variables
from tfdist.pipeline.stages import ModelStages
from tfdist.tensor_parallel.shard_layout import ShardLayout
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable, variable_like
from tfdist.tensorflow_internals.split_variables import ShardedVariable, part_size


class Columns:
    """The columns of a placed model. The variables of the first one are those that the program sees.

    Attributes:
        devices: By column and stage.
        ways: How many neighbouring columns share one copy of the model: those with numbers from `g * ways` on.
        axes: By the id of a variable that such columns split, its axis.
        weight_of_slot: By the id of a slot that is not split yet, the id of its weight.
    """

    def __init__(self, devices: Sequence[Sequence[str]], layout: ShardLayout | None = None) -> None:
        """Creates the columns.

        Args:
            devices: By column and stage.
            layout: Which variables neighbouring columns split, or None.
        """
        self.devices = devices
        self._layout = layout if layout is not None and layout.ways > 1 else None
        self.ways = 1 if self._layout is None else self._layout.ways
        self.axes: Mapping[int, int] = {}
        self.weight_of_slot: Mapping[str, str] = {}
        self._variables: list[keras.Variable] = []

    def __len__(self) -> int:
        return len(self.devices)

    def move_parts(self, model: Any, stages: ModelStages) -> None:
        """Moves variables that were created in parts, and their slots, to the devices of their stages."""
        if self._layout is None:
            return
        calls = [call for stage in stages.stages for call in stage.calls]  # not what only the loss uses
        self.axes = self._layout.axes_of(variable for call in calls for variable in call.variables)
        self._layout.warn_of_unused_keys()
        moved, stage_of = MovedVariables(), {}
        for variable in stages.variables:
            weight = identity_of(held_variable(variable))
            stage_of[weight] = stages.owner[id(variable)] if id(variable) in self.axes else None
            self._move(variable, stage_of[weight], moved)
        for slot, weight in self._slots(model):
            self._move(slot, stage_of.get(weight), moved)
        moved.warn_if_used()

    def _slots(self, model: Any) -> list[tuple[Any, str]]:
        """Returns the variables of the optimizer, each with the id of its weight if it is a new slot."""
        optimizer = compiled_optimizer(model)
        slots = optimizer_variables(optimizer) if optimizer is not None else []
        return [(slot, self.weight_of_slot.get(identity_of(held_variable(slot)), "")) for slot in slots]

    def _move(self, variable: Any, stage: int | None, moved: MovedVariables) -> None:
        held = held_variable(variable)
        if not isinstance(held, ShardedVariable) or held.is_placed:
            return
        if stage is None:  # no layer of a stage uses it: it is complete, as others
            moved.add(variable, *held.shards)
            hold(variable, variable_like(held, held.device))
        else:
            moved.add(variable, *held.place(self._groups(stage)))

    def copy(self, model: Any, stages: ModelStages) -> None:
        """Splits variables and their slots, and creates the missing copies of others."""
        to_split = [variable for variable in stages.variables if id(variable) in self.axes]
        split = {identity_of(held_variable(variable)): variable for variable in to_split}
        for variable in split.values():
            self._split(variable, self.axes[id(variable)])
        for slot, weight in self._slots(model):
            beside = split.get(weight)
            if beside is not None and tuple(slot.shape) == tuple(beside.shape):
                self._split(slot, self.axes[id(beside)], is_slot=True)
        self._variables = copied_variables(model, stages)
        for variable in self._variables:
            if not held_variable(variable).copies:
                for device in self.devices_of(variable)[1:]:
                    copy_to(variable, device)

    def _split(self, variable: Any, axis: int, *, is_slot: bool = False) -> None:
        held = held_variable(variable)
        if isinstance(held, ShardedVariable):
            return
        groups = self._groups(self.devices[0].index(held.device))
        hold(variable, ShardedVariable(held, axis, groups, is_slot=is_slot))

    def _groups(self, stage: int) -> list[list[str]]:
        of_stage = [devices[stage] for devices in self.devices]
        return [of_stage[first : first + self.ways] for first in range(0, len(of_stage), self.ways)]

    def holds(self, variable: keras.Variable) -> bool:
        """Whether each column has a copy or a part of a variable."""
        return any(variable is held for held in self._variables)

    def devices_of(self, variable: keras.Variable) -> tuple[str, ...]:
        """Returns by column the device that holds a variable: mostly, but not always, that of its stage."""
        device = held_variable(variable).device
        stage = self.devices[0].index(device) if device in self.devices[0] else 0
        return tuple(of_stages[stage] for of_stages in self.devices)

    def shape_of_part(self, variable: keras.Variable) -> tuple[int, ...]:
        """Returns the shape of what a column has of a variable."""
        axis = self.axes.get(id(variable))
        return tuple(part_size(size, self.ways) if index == axis else size for index, size in enumerate(variable.shape))

    @contextmanager
    def entered(self, column: int) -> Iterator[None]:
        """In the body, variables are held by their part or copy in a column."""
        held_in_column: dict[int, tuple[Any, Any]] = {}
        for variable in self._variables:
            held = held_variable(variable)
            if isinstance(held, ShardedVariable):
                held_in_column[id(variable)] = variable, held.shards[column]
            elif column:
                held_in_column[id(variable)] = variable, held.copies[column - 1]
        with holding(held_in_column):
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """In the body, each column assigns its copies itself."""
        ColumnVariable.follows = False
        try:
            yield
        finally:
            ColumnVariable.follows = True
