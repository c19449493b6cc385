"""What a custom loop trains: the objects that the program names, their variables, and their state in Python."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.model_state import (
    SEED,
    STATE,
    ModelVariable,
    OptimizerState,
    model_variables,
    optimizers_of,
)
from tfdist.keras_internals.symbolic_build import LateMetrics
from tfdist.recovery.callback_state import CallbackStates
from tfdist.recovery.trained_model import variables_of_metrics
from tfdist.training.metric_totals import MetricTotals
from tfdist.utils.json_state import from_json, to_json
from tfdist.utils.state_methods import StateMethods, state_methods

Json = dict[str, Any]


class TrainedObjects:
    """The objects of a custom loop, under names that are their places in lists, tuples and dicts.

    Args:
        objects: Models, layers, optimizers, metrics, variables, random generators, objects with `state_dict` and
            `load_state_dict` or `get_state` and `set_state`, and lists, tuples and dicts of these.
        strategy: The strategy under which their variables were created.

    Attributes:
        layers: The layers and models among them.
        metric_objects: The metrics among them, also those of models.
        with_state: The objects whose state is in Python, by name.

    Raises:
        ValueError: One of them is none of these, or a layer is not built.

    >>> objects = TrainedObjects({"best": [tf.Variable(0)], "mean": keras.metrics.Mean()}, tf.distribute.get_strategy())
    >>> list(objects.variables()), list(objects.metrics())
    (['state/best/0/value'], ['mean/0.Mean/0', 'mean/0.Mean/1'])
    """

    def __init__(self, objects: Any, strategy: Any) -> None:
        self.strategy = strategy
        self._parts = list(flat_objects(objects))
        self.layers = [one for _, one in self._parts if isinstance(one, keras.layers.Layer)]
        self.with_state: dict[str, StateMethods] = {}
        for name, one in self._parts:
            if isinstance(one, keras.layers.Layer):
                _check_built(name, one)
            elif not _has_variables(one):
                self.with_state[name] = _methods_of(name, one)
        self._late = {name: LateMetrics(one) for name, one in self._parts if isinstance(one, keras.Model)}

    @property
    def metric_objects(self) -> list[Any]:
        metrics = [metric for _, _, metric in self._metrics()]
        return list({id(metric): metric for metric in metrics}.values())

    def variables(self) -> dict[str, ModelVariable]:
        """See `Trained`."""
        found: dict[str, ModelVariable] = {}
        seen: set[int] = set()
        for name, one in self._parts:
            for variable in _variables_of(one):
                if id(variable.variable) not in seen:
                    seen.add(id(variable.variable))
                    found[f"{variable.kind}/{name}/{variable.key}"] = variable
        return found

    def optimizers(self) -> list[Any]:
        """See `Trained`."""
        found: dict[int, Any] = {}
        for _, one in self._parts:
            if isinstance(one, keras.layers.Layer):
                found |= {id(optimizer): optimizer for optimizer in optimizers_of(one)}
            elif isinstance(one, keras.optimizers.Optimizer):
                found |= {id(optimizer): optimizer for optimizer in _with_inner(one)}
        return list(found.values())

    def metrics(self) -> dict[str, Any]:
        """See `Trained`."""
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for name, position, metric in self._metrics():
            for key, variable in variables_of_metrics([metric], position).items():
                if id(variable) not in seen:
                    seen.add(id(variable))
                    found[f"{name}/{key}"] = variable
        return found

    def exchanged_metrics(self) -> list[Any]:
        """See `Trained`: all of them, if they are not too large."""
        found = list(self.metrics().values())
        size = sum(one.shape.num_elements() * tf.as_dtype(one.dtype).size for one in found)
        return found if size <= MetricTotals.largest_bytes else []

    def updated_variables(self) -> list[Any]:
        """See `Trained`.

        Raises:
            ValueError: An optimizer updates variables of a model that is not among the objects.
        """
        known = {id(variable.variable) for variable in self.variables().values()}
        updated = {}
        for optimizer in self.optimizers():
            for variable in OptimizerState(optimizer).trainable_variables:
                if id(variable) not in known:
                    raise ValueError(
                        "An optimizer of a custom loop updates a variable that is not part of its state. Received: "
                        f"{type(optimizer).__name__}, which updates {getattr(variable, 'path', variable.name)!r}. "
                        "Expected: the model of each optimizer, too. Give the loop the model that has this variable."
                    )
                updated[id(variable)] = variable
        return list(updated.values())

    def accumulation(self) -> Accumulation | None:
        """See `Trained`: a loop has no callback that changes the number of micro-steps."""
        return None

    def build(self, element_spec: Any) -> None:
        """See `Trained`. Builds the optimizers of compiled models; others are built like those of the checkpoint."""
        del element_spec
        for one in self.layers:
            optimizer = getattr(one, "optimizer", None)
            if optimizer is not None and one.trainable_variables:
                OptimizerState(optimizer).build(one.trainable_variables, self.strategy)

    def creates_later(self, name: str) -> bool:
        """See `Trained`: metrics of compiled models."""
        return any(late.exist_later and name.startswith(f"metrics/{path}/") for path, late in self._late.items())

    def on_creation(self, function: Callable[[], None]) -> None:
        """See `Trained`."""
        for late in self._late.values():
            late.call_when_created(function)

    def wait(self) -> None:
        """See `Trained`: no other process computes steps of a loop."""

    def _metrics(self) -> Iterator[tuple[str, int, Any]]:
        for name, one in self._parts:
            if isinstance(one, keras.metrics.Metric):
                yield name, 0, one
            elif isinstance(one, keras.Model):
                for position, metric in enumerate(one.metrics):
                    yield name, position, metric


class ObjectStates:
    """The states of objects that have them in Python: each worker saves its own."""

    def __init__(self, objects: Mapping[str, StateMethods]) -> None:
        self._objects = objects

    def save(self) -> CallbackStates:
        """See `PythonState`.

        Raises:
            ValueError: An object returns what cannot be saved; the message names it.
        """
        tensors: dict[str, np.ndarray] = {}
        values = {name: to_json(one.get(), tensors, f"objects/{name}") for name, one in self._objects.items()}
        return CallbackStates(values, {}, tensors)

    def check(self, values: Json, *, all_present: bool) -> None:
        """See `PythonState`."""
        del all_present
        missing, added = sorted(set(values) - set(self._objects)), sorted(set(self._objects) - set(values))
        if missing or added:
            raise ValueError(
                "The objects of this loop differ from those of the checkpoint. Received: in the checkpoint only: "
                f"{missing}; here only: {added}. Expected: the same objects with state under the same names. Give the "
                "loop those with which the training started, or use another directory."
            )

    def restore(self, values: Json, tensors: Mapping[str, np.ndarray]) -> None:
        """See `PythonState`."""
        for name, one in self._objects.items():
            one.set(from_json(values[name], tensors))


def _has_variables(one: Any) -> bool:
    is_of_keras = isinstance(one, keras.layers.Layer | keras.optimizers.Optimizer | keras.metrics.Metric)
    return is_of_keras or bool(_variables_of(one))


def _variables_of(one: Any) -> Sequence[ModelVariable]:
    """Returns the variables of an object, besides those of optimizers and metrics."""
    if isinstance(one, keras.layers.Layer):
        return model_variables(one)
    if isinstance(one, keras.Variable | tf.Variable):  # may differ between the workers
        return [ModelVariable(STATE, "value", one)]
    is_generator = isinstance(one, keras.random.SeedGenerator | tf.random.Generator)
    return [ModelVariable(SEED, "state", one.state)] if is_generator else []


def _with_inner(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    for inner in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())):
        if inner is not None:
            yield from _with_inner(inner)


def _check_built(name: str, layer: Any) -> None:
    if not layer.built:
        raise ValueError(
            "The variables of a model must exist before a custom loop begins, to be saved, restored or sent. Received: "
            f"{type(layer).__name__} {layer.name!r} ({name or 'the only object'}), which is not built. Expected: one "
            "that is. Give the model a `keras.Input`, or call `model.build(shape)` in the scope of the strategy."
        )


def _methods_of(name: str, one: Any) -> StateMethods:
    methods = state_methods(one)
    if methods is None:
        raise ValueError(
            "The state of a custom loop consists of what its steps change, under names. Received: "
            f"{one!r} ({name or 'the only object'}). Expected: models, layers, optimizers, metrics, variables, random "
            "generators, objects with `state_dict` and `load_state_dict` or `get_state` and `set_state`, and lists, "
            "tuples and dicts of these. Give the objects themselves; hold numbers in a `tf.Variable`, or in an object "
            "with these methods."
        )
    return methods


def flat_objects(objects: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the objects in lists, tuples and dicts with their names.

    >>> list(flat_objects({"a": [1, 2], "b": 3}))
    [('a/0', 1), ('a/1', 2), ('b', 3)]
    """
    parts: list[tuple[Any, Any]]
    if isinstance(objects, Mapping):
        parts = list(objects.items())
    elif isinstance(objects, list | tuple):
        parts = list(enumerate(objects))
    else:
        yield name, objects
        return
    for key, one in parts:
        yield from flat_objects(one, f"{name}/{key}" if name else str(key))
