"""Columns of stages: their devices have copies of the model, or parts of variables that neighbouring columns share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from tfdist.keras_internals.placed_variables import held_variable, holding
from tfdist.pipeline.placement import copied_variables, copy_to, place
from tfdist.pipeline.stage_functions import StageFunction, StageInputs, StageKind
from tfdist.pipeline.stages import ModelStages, Stage
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable

JointUpdate = Callable[[Any, Sequence[keras.Variable], Sequence[Sequence[Any]], "Columns"], None]


class Columns:
    """The columns of a placed model. The variables of the first one are those that the program sees.

    Here each column is a copy of the model. Those of a subclass may share a copy, so it says what a column holds, how a
    stage is computed and updated, and what it cannot train.

    Attributes:
        devices: By column and stage.
        ways: How many neighbouring columns share one copy of the model: those with numbers from `g * ways` on.
        axes: By the id of a variable that such columns split, its axis.
    """

    ways = 1
    axes: Mapping[int, int] = {}

    def __init__(self, devices: Sequence[Sequence[str]]) -> None:
        """Creates the columns.

        Args:
            devices: By column and stage.
        """
        self.devices = devices
        self._variables: list[keras.Variable] = []

    def __len__(self) -> int:
        return len(self.devices)

    def place(self, model: Any, stages: ModelStages, chief: str, colocated_with: dict[str, str]) -> None:
        """Moves variables, also new ones, to their stages, and creates what further columns hold; see `place`."""
        place(model, stages, self.devices[0], chief, colocated_with)
        self._copy(model, stages)

    def _copy(self, model: Any, stages: ModelStages) -> None:
        self._variables = copied_variables(model, stages)
        for variable in self._variables:
            if len(held_variable(variable).in_columns) == 1:
                for device in self.devices_of(variable)[1:]:
                    copy_to(variable, device)

    def check(self, model: Any, step: str) -> None:
        """Raises a `ValueError` if a step, such as "train_step", cannot run in these columns. Copies can run all."""

    def stage_function(
        self, model: Any, stages: ModelStages, stage: Stage, kind: StageKind, example: StageInputs
    ) -> StageFunction:
        """Returns the traced function of a stage for the columns that share a copy; see `StageFunction`."""
        return StageFunction(model, stages, stage, kind, example)

    def joint_update(self, optimizer: Any) -> JointUpdate | None:
        """Returns the update of split variables whose step depends on complete ones; None if each part is alone.

        It takes the optimizer, the variables, by column and variable the clipped gradients, and the columns.
        """
        del optimizer
        return None

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
        return tuple(variable.shape)

    @contextmanager
    def entered(self, column: int) -> Iterator[None]:
        """In the body, variables are held by their part or copy in a column."""
        with holding({id(one): (one, held_variable(one).in_columns[column]) for one in self._variables}):
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """In the body, each column assigns its copies itself."""
        ColumnVariable.follows = False
        try:
            yield
        finally:
            ColumnVariable.follows = True
