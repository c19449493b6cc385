"""Columns of stages: their devices have copies of the model, or parts of variables that neighbouring columns share."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import SHAPE_GRAPH
from tfdist.keras_internals.placed_variables import (
    held_variable,
    hold,
    holding,
    identity_of,
    optimizer_and_loss_scale,
    shared_optimizer_variables,
)
from tfdist.pipeline.stage_functions import StageFunction
from tfdist.pipeline.stages import ModelStages
from tfdist.tensorflow_internals.function_graphs import captured_handles
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable, variable_like

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
        self.devices = devices
        self._variables: list[keras.Variable] = []

    def __len__(self) -> int:
        return len(self.devices)

    def place(self, model: Any, stages: ModelStages, chief: str, colocated_with: dict[str, str]) -> None:
        """Moves weights to their stage, slots to their weight, metrics to the last stage, and fills further columns.

        A variable is moved once. Functions that were traced then use it where it is, so it stays there if another model
        shares it, or if the same model is cut otherwise: for that one another stage's device may hold it.

        Scalars of the optimizer are on the chief. `colocated_with` has by the id of a slot the id of its weight; slots
        that were moved are removed from it.
        """
        devices, moved = self.devices[0], MovedVariables()
        for variable in stages.variables:
            self._move_to(variable, devices[stages.owner[id(variable)]], chief, moved)
        device_of = {identity_of(held): held.device for held in map(held_variable, stages.variables)}
        shared = _ids_of_shared(model)
        for variable in optimizer_variables(model):
            beside = device_of.get(colocated_with.pop(identity_of(held_variable(variable)), ""))
            target = chief if id(variable) in shared else beside or devices[0]
            self._move_to(variable, target, chief, moved)
        for variable in model.metrics_variables:
            if id(variable) not in stages.owner:
                self._move_to(variable, devices[-1], chief, moved)
        moved.warn_if_used()
        self._copy(model, stages)

    def _move_to(self, variable: keras.Variable, device: str, chief: str, moved: "MovedVariables") -> None:
        held = held_variable(variable)
        if not hasattr(held, "in_columns") or held.device not in (*self.devices[0], chief):
            moved.add(variable, held)
            hold(variable, variable_like(held, device))

    def _copy(self, model: Any, stages: ModelStages) -> None:
        """Creates the missing copies of what each column has: the variables of stages, and the optimizer's but scalars.

        They follow assignments to the variable of the first column from outside of a step.
        """
        shared = _ids_of_shared(model)
        of_optimizer = [variable for variable in optimizer_variables(model) if id(variable) not in shared]
        self._variables = [*stages.variables, *of_optimizer]
        for variable in self._variables:
            held = held_variable(variable)
            if len(held.in_columns) == 1:
                held.copies = tuple(variable_like(held, device) for device in self.devices_of(variable)[1:])

    def check(self, model: Any, step: str) -> None:
        """Raises a `ValueError` if a step, such as "train_step", cannot run in these columns. Copies can run all."""

    @property
    def stage_function(self) -> Callable[..., StageFunction]:
        """Traces the function of a stage for the columns that share a copy, with the arguments of `StageFunction`."""
        return StageFunction

    def joint_update(self, optimizer: Any) -> JointUpdate | None:
        """Returns the update of split variables whose step depends on complete ones; None if each part is alone.

        It takes the optimizer, the variables, by column and variable the clipped gradients, and the columns.
        """
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
        parts = {id(variable): (variable, held_variable(variable).in_columns[column]) for variable in self._variables}
        with holding(parts):
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """In the body, each column assigns its copies itself."""
        ColumnVariable.follows = False
        try:
            yield
        finally:
            ColumnVariable.follows = True


class MovedVariables:
    """Variables that one placement has moved. Each is a new `tf.Variable` afterwards."""

    def __init__(self) -> None:
        self._earlier: list[tuple[str, weakref.ref[Any], weakref.ref[Any]]] = []

    def add(self, variable: keras.Variable, *earlier: tf.Variable) -> None:
        """Notes that other `tf.Variable`s than `earlier` will hold `variable`."""
        self._earlier += [(variable.path, weakref.ref(held), weakref.ref(held.handle)) for held in earlier]

    def warn_if_used(self) -> None:
        """Warns if something has kept an earlier `tf.Variable`, as a traced function does, once for all of them."""
        if not self._alive():
            return
        gc.collect()
        # Not of the graphs in which Keras has computed shapes: a layer's own gradients keep them.
        captured = captured_handles(ignored=SHAPE_GRAPH) if self._alive() else set()
        kept = [path for path, variable, handle in self._alive() if variable() is not None or id(handle()) in captured]
        if kept:
            warnings.warn(
                "A function that was traced before the first step in stages keeps the earlier values of weights, "
                f"because that step has moved them to the devices of their stages. Received: {len(kept)} such "
                f"variables, the first of them {kept[0]!r}, that a `tf.function` or a reference to a `tf.Variable` "
                "uses. Expected: functions that are traced after the first `fit`, `evaluate` or `predict`. Call "
                "`predict` on a batch before them, and read `variable.value` each time.",
                stacklevel=2,
            )

    def _alive(self) -> list[tuple[str, weakref.ref[Any], weakref.ref[Any]]]:
        return [entry for entry in self._earlier if entry[2]() is not None]


def optimizer_variables(model: Any) -> list[keras.Variable]:
    """Returns all variables of the optimizer of a model, and of the one inside a `LossScaleOptimizer`."""
    pair = optimizer_and_loss_scale(getattr(model, "optimizer", None))
    by_id = {id(variable): variable for optimizer in pair if optimizer is not None for variable in optimizer.variables}
    return list(by_id.values())


def _ids_of_shared(model: Any) -> set[int]:
    optimizer = getattr(model, "optimizer", None)
    return set() if optimizer is None else {id(variable) for variable in shared_optimizer_variables(optimizer)}
