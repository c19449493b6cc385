"""Columns of which each `ways` neighbours share a copy of the model: each has parts of split variables, or copies."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tfdist.keras_internals.placed_variables import compiled_optimizer, held_variable, hold, holding, identity_of
from tfdist.model_parallel.columns import Columns
from tfdist.model_parallel.placement import MovedVariables, optimizer_variables
from tfdist.model_parallel.shard_layout import ShardLayout
from tfdist.model_parallel.stages import ModelStages
from tfdist.tensorflow_internals.placed_strategy import variable_like
from tfdist.tensorflow_internals.split_variables import ShardedVariable


class ShardColumns(Columns):
    """The columns of a model with a layout: those with numbers from `g * ways` on are group `g`."""

    def __init__(self, devices: Sequence[Sequence[str]], layout: ShardLayout) -> None:
        """Creates the columns.

        Args:
            devices: By column and stage.
            layout: Which variables are split.
        """
        super().__init__(devices)
        self._layout, self.ways = layout, layout.ways
        self.axes: Mapping[int, int] = {}

    def move_parts(self, model: Any, stages: ModelStages) -> None:
        """Moves variables that were created in parts, and their slots, to the devices of their stages."""
        calls = [call for stage in stages.stages for call in stage.calls]  # not what only the loss uses
        self.axes = self._layout.axes_of(variable for call in calls for variable in call.variables)
        self._layout.warn_of_unused_keys()
        moved, stage_of = MovedVariables(), {}
        for variable in stages.variables:
            held = held_variable(variable)
            stage_of[identity_of(held)] = stages.owner[id(variable)] if id(variable) in self.axes else None
            self._move(variable, stage_of[identity_of(held)], moved)
        optimizer = compiled_optimizer(model)
        for slot in optimizer_variables(optimizer) if optimizer is not None else []:
            weight = self.weight_of_slot.get(identity_of(held_variable(slot)), "")
            self._move(slot, stage_of.get(weight), moved)
        moved.warn_if_used()

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
        split = {identity_of(held_variable(one)): one for one in stages.variables if id(one) in self.axes}
        for variable in stages.variables:
            if id(variable) in self.axes:
                self._split(variable, self.axes[id(variable)])
        optimizer = compiled_optimizer(model)
        for slot in optimizer_variables(optimizer) if optimizer is not None else []:
            beside = split.get(self.weight_of_slot.get(identity_of(held_variable(slot)), ""))
            if beside is not None and tuple(slot.shape) == tuple(beside.shape):
                self._split(slot, self.axes[id(beside)], is_slot=True)
        super().copy(model, stages)

    def _split(self, variable: Any, axis: int, *, is_slot: bool = False) -> None:
        held = held_variable(variable)
        if isinstance(held, ShardedVariable):
            return
        groups = self._groups(self.devices[0].index(held.device))
        hold(variable, ShardedVariable(held, axis, groups, is_slot=is_slot))

    def _groups(self, stage: int) -> list[list[str]]:
        of_stage = [devices[stage] for devices in self.devices]
        return [of_stage[first : first + self.ways] for first in range(0, len(of_stage), self.ways)]

    @contextmanager
    def entered(self, column: int) -> Iterator[None]:
        """In the body, variables are held by their part or copy in a column."""
        pairs = [(one, held_variable(one)) for one in self._variables]
        parts = [(one, held.shards[column]) for one, held in pairs if isinstance(held, ShardedVariable)]
        copies = [(one, held.copies[column - 1]) for one, held in pairs if not isinstance(held, ShardedVariable)]
        with holding({id(variable): (variable, held) for variable, held in [*parts, *(copies if column else [])]}):
            yield
