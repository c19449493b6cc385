"""Moves the variables of a model and its optimizer to the devices of their stages."""

import gc
import warnings
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import SHAPE_GRAPH
from tfdist.keras_internals.placed_variables import (
    compiled_optimizer,
    held_variable,
    hold,
    identity_of,
    optimizers_of,
    shared_optimizer_variables,
)
from tfdist.pipeline.stages import ModelStages
from tfdist.tensorflow_internals.function_graphs import captured_handles
from tfdist.tensorflow_internals.placed_strategy import variable_like


class MovedVariables:
    """Variables that one placement has moved. Each is a new `tf.Variable` afterwards."""

    def __init__(self) -> None:
        self._earlier: list[tuple[str, weakref.ref[Any], weakref.ref[Any]]] = []

    def add(self, variable: keras.Variable, *earlier: tf.Variable) -> None:
        """Notes that other `tf.Variable`s than `earlier` will hold `variable`."""
        self._earlier += [(variable.path, weakref.ref(one), weakref.ref(one.handle)) for one in earlier]

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
        return [one for one in self._earlier if one[2]() is not None]


def place(model: Any, stages: ModelStages, devices: Sequence[str], chief: str, colocated_with: dict[str, str]) -> None:
    """Moves variables from device to device: weights to their stage, slots to their weight, metrics to the last stage.

    A variable is moved once. Functions that were traced then use it where it is, so it stays there if another model
    shares it, or if the same model is cut otherwise: for that one another stage's device may hold it.

    Args:
        model: The model.
        stages: Its stages.
        devices: By stage, of the first column.
        chief: The device of the optimizer's scalars.
        colocated_with: By the id of a slot, the id of its weight. Slots that were moved are removed.
    """
    places, moved = {*devices, chief}, MovedVariables()
    for variable in stages.variables:
        _move(variable, devices[stages.owner[id(variable)]], places, moved)
    device_of = {identity_of(held_variable(one)): held_variable(one).device for one in stages.variables}
    optimizer = compiled_optimizer(model)
    if optimizer is not None:
        shared = {id(one) for one in shared_optimizer_variables(optimizer)}
        for variable in optimizer_variables(optimizer):
            beside = device_of.get(colocated_with.pop(identity_of(held_variable(variable)), ""))
            _move(variable, chief if id(variable) in shared else beside or devices[0], places, moved)
    for variable in model.metrics_variables:
        if id(variable) not in stages.owner:
            _move(variable, devices[-1], places, moved)
    moved.warn_if_used()


def optimizer_variables(optimizer: Any) -> list[keras.Variable]:
    """Returns all variables of an optimizer, and of the one inside a `LossScaleOptimizer`."""
    inner, outer = optimizers_of(optimizer)
    return list({id(one): one for one in [*inner.variables, *(outer.variables if outer else [])]}.values())


def copied_variables(model: Any, stages: ModelStages) -> list[keras.Variable]:
    """Returns the variables of which each column has a copy: those of the stages, and the optimizer's but scalars."""
    optimizer = compiled_optimizer(model)
    if optimizer is None:
        return list(stages.variables)
    shared = {id(one) for one in shared_optimizer_variables(optimizer)}
    return [*stages.variables, *(one for one in optimizer_variables(optimizer) if id(one) not in shared)]


def copy_to(variable: keras.Variable, device: str) -> tf.Variable:
    """Creates a copy on `device` of a placed variable, which follows assignments to it from outside of a step."""
    original = held_variable(variable)
    copy = variable_like(original, device)
    original.copies = (*original.copies, copy)
    return copy


def _move(variable: keras.Variable, device: str, places: Collection[str], moved: MovedVariables) -> None:
    held = held_variable(variable)
    if not hasattr(held, "in_columns") or held.device not in places:
        moved.add(variable, held)
        hold(variable, variable_like(held, device))
