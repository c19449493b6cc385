"""The variables of a Keras model and its optimizers, by keys that are the same in every process.

Keras numbers the names of layers by the layers that a process created before, so names differ between processes. The
keys here consist of a layer's position in the model and its class: `3.Dense/0` is the first variable of the fourth
layer.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.sharded_optimizers import split_slots
from tfdist.keras_internals.split_slot import SplitSlot

WEIGHT, STATE, SEED = "weights", "state", "seeds"
_PLAIN = (bool, int, float, str)
_MOST_ITEMS = 1000  # Larger lists and dictionaries are not searched: they hold data.


@dataclass(frozen=True)
class ModelVariable:
    """A variable of a model.

    Attributes:
        kind: `WEIGHT` if it was created as trainable (also while frozen), `SEED` for the state of a seed generator,
            `STATE` for others, such as moving statistics.
        key: Its position in the model.
        variable: The `keras.Variable`.
    """

    kind: str
    key: str
    variable: Any


def model_variables(model: Any) -> list[ModelVariable]:
    """Returns all variables of `model`, except those of its metrics, each once."""
    unique: dict[int, ModelVariable] = {}
    listed = {id(part) for variable in model.variables for part in (variable, variable._value)}
    for position, layer in enumerate(model._flatten_layers()):
        # Keras lists neither the states of stateful RNNs nor a layer's own `tf.Variable`s.
        attributes = [value for value in _within(layer) if isinstance(value, keras.Variable | tf.Variable)]
        for kind, place, variables in (
            (WEIGHT, "", layer._trainable_variables),
            (STATE, "", layer._non_trainable_variables),
            (SEED, "", [generator.state for generator in layer._seed_generators]),
            (STATE, "own/", [variable for variable in attributes if id(variable) not in listed]),
        ):
            for index, variable in enumerate(variables):
                key = f"{position}.{type(layer).__name__}/{place}{index}"
                unique.setdefault(id(variable), ModelVariable(kind, key, variable))
    remaining = [variable for variable in model.variables if id(variable) not in unique]
    others = [ModelVariable(STATE, f"model/{index}", variable) for index, variable in enumerate(remaining)]
    return [*unique.values(), *others]


def is_on_replicas(variable: keras.Variable) -> bool:
    """Whether each replica has a copy, or a part, of a variable."""
    return isinstance(variable, SplitSlot) or isinstance(variable._value, tf.distribute.DistributedValues)


def components(strategy: Any, variable: Any) -> list[Any]:
    """Returns this worker's `tf.Variable`s of a variable: one per local replica if it is distributed.

    A slot that is split over the replicas stands for itself: its whole value is read and assigned.
    """
    if isinstance(variable, SplitSlot):
        return [variable]
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(value, tf.distribute.DistributedValues):
        return list(strategy.experimental_local_results(value))
    return [value]


def optimizers_of(model: Any) -> Iterator[Any]:
    """Yields the optimizer of `model`, its inner optimizers, and those in attributes of the model, each once."""
    seen: set[int] = set()

    def each(optimizer: Any) -> Iterator[Any]:
        if optimizer is None or id(optimizer) in seen:
            return
        seen.add(id(optimizer))
        yield optimizer
        for inner in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())):
            yield from each(inner)

    yield from each(getattr(model, "optimizer", None))  # a model that was never compiled has none
    for value in _within(model):
        if isinstance(value, keras.optimizers.Optimizer):
            yield from each(value)


def has_compiled_parts(model: Any) -> bool:
    """Whether a model that is a part of another one is compiled, and so has an optimizer."""
    return any(getattr(layer, "optimizer", None) is not None for layer in model._flatten_layers(include_self=False))


def updating_optimizers(model: Any) -> list[Any]:
    """Returns those of `optimizers_of` that are built and update variables themselves, not by optimizers within."""
    return [
        optimizer
        for optimizer in optimizers_of(model)
        if getattr(optimizer, "built", False)
        and not hasattr(optimizer, "inner_optimizer")
        and not hasattr(optimizer, "optimizers")
    ]


def _within(owner: Any) -> list[Any]:
    """Returns the objects in the attributes of a layer or model, also those in lists, tuples and dictionaries."""
    objects: list[Any] = []
    # Attributes of TensorFlow's tracking hold the same values again.
    waiting = [value for name, value in vars(owner).items() if not name.startswith("_self_")]
    waiting.reverse()
    while waiting:
        value = waiting.pop()
        # Not `type`: TensorFlow's proxies of dictionaries and lists name the class of what they wrap.
        kind = _searched_as(value.__class__)
        if kind is object:
            objects.append(value)
        elif kind is not None and len(value) <= _MOST_ITEMS:
            waiting.extend(reversed(list(value.values()) if kind is Mapping else value))
    return objects


@functools.lru_cache(maxsize=1000)  # every save asks for each attribute of each layer
def _searched_as(kind: type) -> type | None:
    """Returns `Mapping` or `list` if the items of such a value are searched, `None` if it is ignored, else `object`."""
    if issubclass(kind, (type(None), *_PLAIN)):
        return None
    return Mapping if issubclass(kind, Mapping) else list if issubclass(kind, list | tuple) else object


class OptimizerState:
    """The variables of one optimizer, without those of its inner optimizers."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def kind(self) -> str:
        return type(self._optimizer).__name__

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration that gives the variables their meaning: all switches, the kind of schedule, the loss scale.

        Numbers such as decays are left out: users may change them on purpose. (The learning rate is a variable.)
        """
        config = self._optimizer.get_config()
        rate = getattr(self._optimizer, "_learning_rate", None)
        settings: dict[str, Any] = {name: value for name, value in config.items() if isinstance(value, bool)}
        settings["learning_rate"] = "variable" if isinstance(rate, keras.Variable) else type(rate).__name__
        if isinstance(config.get("loss_scale_factor"), int | float):
            settings["loss_scale_factor"] = float(config["loss_scale_factor"])
        return settings

    @property
    def learning_rate(self) -> float | None:
        """The learning rate if it is a variable; `None` if a schedule or a function returns it."""
        rate = getattr(self._optimizer, "_learning_rate", None)
        return float(rate.numpy()) if isinstance(rate, keras.Variable) else None

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-steps of an update."""
        return int(self._optimizer.gradient_accumulation_steps or 1)

    @property
    def micro_steps(self) -> int:
        return int(self._optimizer._iterations.numpy())

    @property
    def counter(self) -> Any:
        """The variable that counts micro-steps."""
        return self._optimizer._iterations

    @property
    def accumulators(self) -> list[Any]:
        """The sums of a replica's gradients, one per trainable variable; they differ between replicas."""
        return list(getattr(self._optimizer, "_accumulated_gradients", ()))

    @property
    def exact_weights(self) -> dict[int, Any]:
        """The weights of which all replicas hold rounded copies, by position, if updates are sent rounded."""
        slots = split_slots(self._optimizer)
        return {} if slots is None else dict(slots.exact_weights)

    @property
    def variables(self) -> list[Any]:
        """All other variables: counters, learning rate, averages, slots, loss scale; equal on all replicas."""
        accumulator_ids = {id(variable) for variable in self.accumulators}
        return [variable for variable in self._optimizer._variables if id(variable) not in accumulator_ids]

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables that it was built for, in its order; none if it was not built."""
        return list(self._optimizer._trainable_variables) if self._optimizer.built else []

    def build(self, variables: list[Any], strategy: Any) -> None:
        """Creates the slots for `variables`, as the first update does, unless it was built."""
        if not self._optimizer.built:
            with strategy.scope():
                self._optimizer.build(variables)
