"""Finds the variables of a training and gives them names that the same program finds again in another process."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.model_state import (
    SEED,
    WEIGHT,
    ModelVariable,
    OptimizerState,
    components,
)
from tfdist.keras_internals.split_slot import SplitSlot
from tfdist.recovery.compatibility import VariableSpec
from tfdist.recovery.random_generators import generator_variables
from tfdist.recovery.resharding import Rule
from tfdist.recovery.trained_model import Trained
from tfdist.training.strategy_protocol import training_strategy

LOCAL_UPDATES = "local_updates/"
ACCUMULATORS, GENERATORS, METRICS = "accumulators/", "generators/", "metrics/"
EXACT_WEIGHTS = "exact_weights/"


@dataclass(frozen=True)
class NamedVariable:
    """A variable of a training."""

    path: str  # the name that users know
    # its `tf.Variable`s on this worker: one per local replica if it is distributed, else one
    components: list[Any] = field(repr=False)
    rule: Rule = "first"  # how it is converted to another number of replicas

    @property
    def spec(self) -> VariableSpec:
        """Shape, dtype and path."""
        first = self.components[0]
        return VariableSpec(tuple(first.shape), tf.as_dtype(first.dtype).name, self.path)


class NamedVariables:
    """The variables of a training that exist at first use. Create a new object to find later ones."""

    def __init__(self, trained: Trained) -> None:
        self._trained, self._strategy = trained, trained.strategy
        self._local_updates = training_strategy(self._strategy).local_updates

    @cached_property
    def optimizers(self) -> list[OptimizerState]:
        """All optimizers, including those that other optimizers wrap."""
        return [OptimizerState(optimizer) for optimizer in self._trained.optimizers()]

    @property
    def local_replicas(self) -> int:
        """The number of replicas of this worker."""
        return max((len(variable.components) for variable in self._weights_and_slots.values()), default=1)

    @cached_property
    def shared(self) -> dict[str, NamedVariable]:
        """Variables that are equal on all replicas: weights, also frozen ones, and optimizers.

        Accumulators are left out, unless they are split over the replicas and hold the sums over all. With local
        updates these are the values that workers have exchanged, instead of each worker's weights and slots.
        """
        if self._local_updates is not None:
            return self._of_local_updates(0)
        variables = dict(self._weights_and_slots)
        for index, optimizer in enumerate(self.optimizers):
            for number, variable in enumerate(optimizer.accumulators):
                if isinstance(variable, SplitSlot):
                    variables[f"{ACCUMULATORS}{index}/{number}"] = self._named(variable)
            for position, variable in optimizer.exact_weights.items():
                variables[f"{EXACT_WEIGHTS}{index}/{position}"] = self._named(variable)
        return variables

    @cached_property
    def _weights_and_slots(self) -> dict[str, NamedVariable]:
        variables = {
            key: self._named(variable.variable)
            for key, variable in self._model_variables.items()
            if variable.kind == WEIGHT
        }
        for index, optimizer in enumerate(self.optimizers):
            for number, variable in enumerate(optimizer.variables):
                variables[f"optimizer/{index}.{optimizer.kind}/{number}"] = self._named(variable)
        return variables

    def _of_local_updates(self, part: int) -> dict[str, NamedVariable]:
        """Returns what workers share (0), or count by themselves (1), between two exchanges of weights."""
        variables = self._local_updates.saved_variables(self._trained.optimizers())[part]
        return {f"{LOCAL_UPDATES}{name}": self._named(variable) for name, variable in variables.items()}

    @cached_property
    def per_replica(self) -> dict[str, NamedVariable]:
        """Variables that differ between replicas, without metrics and compression state."""
        variables = {
            key: self._named(variable.variable, "first" if variable.kind == SEED else "mean")
            for key, variable in self._model_variables.items()
            if variable.kind != WEIGHT
        }
        for index, optimizer in enumerate(self.optimizers):
            for number, variable in enumerate(optimizer.accumulators):
                if not isinstance(variable, SplitSlot):
                    rule: Rule = "sum" if self._local_updates is None else "mean"
                    variables[f"{ACCUMULATORS}{index}/{number}"] = self._named(variable, rule)
        if self._local_updates is not None:
            worker_variables = {
                name: replace(variable, rule="mean") for name, variable in self._weights_and_slots.items()
            }
            variables |= worker_variables | self._of_local_updates(1)
        return variables | {f"{GENERATORS}{name}": self._named(state) for name, state in generator_variables().items()}

    @cached_property
    def metrics(self) -> dict[str, NamedVariable]:
        """The states of the metrics and of the loss trackers."""
        return {
            f"{METRICS}{key}": self._named(variable, "total" if variable.aggregation == "sum" else "first")
            for key, variable in self._trained.metrics().items()
        }

    def exchanged_metrics(self) -> dict[str, Any]:
        """Returns the Keras variables among `metrics` whose sums over all replicas each step exchanges."""
        exchanged = set(map(id, self._trained.exchanged_metrics()))
        return {
            f"{METRICS}{key}": variable
            for key, variable in self._trained.metrics().items()
            if id(variable) in exchanged
        }

    def send_split_slots(self) -> None:
        """Takes part in gathering the slots that are split over the replicas, which the chief copies from `shared`."""
        for variable in self.shared.values():
            for component in variable.components:
                if isinstance(component, SplitSlot):
                    component.read_value()

    def variables_by_key(self) -> dict[str, Any]:
        """Returns the model's variables by their names."""
        return {key: variable.variable for key, variable in self._model_variables.items()}

    def model_keys(self) -> dict[int, str]:
        """Returns those names by `id(variable)`."""
        return {id(variable): key for key, variable in self.variables_by_key().items()}

    @cached_property
    def _model_variables(self) -> dict[str, ModelVariable]:
        return self._trained.variables()

    def _named(self, variable: Any, rule: Rule = "first") -> NamedVariable:
        path = getattr(variable, "path", None) or variable.name.partition(":")[0]  # a `tf.Variable` has a name only
        return NamedVariable(str(path), components(self._strategy, variable), rule)


def variable_specs(variables: Mapping[str, NamedVariable]) -> dict[str, VariableSpec]:
    """Returns the specs of `variables`."""
    return {name: variable.spec for name, variable in variables.items()}
