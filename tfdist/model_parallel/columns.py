"""Columns of stages: copies of the model on other devices."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from tfdist.keras_internals.placed_variables import held_variable, holding
from tfdist.model_parallel.placement import copied_variables, copy_to
from tfdist.model_parallel.stages import ModelStages
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable
from tfdist.tensorflow_internals.split_variables import part_size


class Columns:
    """The columns of a placed model. The variables of the first one are those that the program sees.

    Attributes:
        devices: By column and stage.
        ways: How many neighbouring columns share one copy of the model; here 1.
        axes: By the id of a variable that such columns split, its axis.
        weight_of_slot: By the id of a slot that is not split yet, the id of its weight.
    """

    ways = 1
    axes: Mapping[int, int] = {}

    def __init__(self, devices: Sequence[Sequence[str]]) -> None:
        self.devices = devices
        self.weight_of_slot: Mapping[str, str] = {}
        self._variables: list[keras.Variable] = []

    def __len__(self) -> int:
        return len(self.devices)

    def copy(self, model: Any, stages: ModelStages) -> None:
        """Creates the missing copies of the model's placed variables."""
        self._variables = copied_variables(model, stages)
        for variable in self._variables:
            if not held_variable(variable).copies:
                for device in self.devices_of(variable)[1:]:
                    copy_to(variable, device)

    def holds(self, variable: keras.Variable) -> bool:
        """Whether each column has a copy or a part of a variable."""
        return any(variable is one for one in self._variables)

    def move_parts(self, model: Any, stages: ModelStages) -> None:
        """Moves variables that were created in parts, which other columns than these share, to their stages."""

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
        """In the body, variables are held by their copy in a column."""
        held = [(variable, held_variable(variable)) for variable in self._variables] if column else []
        with holding({id(variable): (variable, one.copies[column - 1]) for variable, one in held}):
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """In the body, each column assigns its copies itself."""
        ColumnVariable.follows = False
        try:
            yield
        finally:
            ColumnVariable.follows = True
