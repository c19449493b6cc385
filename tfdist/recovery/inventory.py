"""The variables of a training by stable names: what is equal on all replicas, what each has for itself, the metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tfdist.keras_internals.model_state import (
    SEED,
    WEIGHT,
    ModelVariable,
    components,
    metric_variables_by_key,
    model_variables,
    optimizers_of,
    path_of,
)
from tfdist.keras_internals.optimizer_state import OptimizerState
from tfdist.recovery.comparison import Signature
from tfdist.recovery.generators import generator_variables
from tfdist.recovery.replicas import Rule

ACCUMULATORS, GENERATORS, METRICS = "accumulators/", "generators/", "metrics/"


@dataclass(frozen=True)
class NamedVariable:
    """A variable of a training.

    Attributes:
      path: what people know it by.
      components: its `tf.Variable`s on this worker: one a local replica if it is distributed, else one.
      rule: how it is shared out to another number of replicas.
    """

    path: str
    components: list[Any] = field(repr=False)
    rule: Rule = "first"

    @property
    def signature(self) -> Signature:
        """Its shape, dtype and path."""
        first = self.components[0]
        return Signature(tuple(first.shape), first.dtype.name, self.path)


class Inventory:
    """What there is when it is first asked; variables that are made later are found by another inventory."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._strategy = model.distribute_strategy

    @cached_property
    def optimizers(self) -> list[OptimizerState]:
        """The optimizers, those that others are made of included."""
        return [OptimizerState(optimizer) for optimizer in optimizers_of(self._model)]

    @property
    def local_replicas(self) -> int:
        """How many replicas this worker has."""
        return max((len(variable.components) for variable in self.shared.values()), default=1)

    @cached_property
    def shared(self) -> dict[str, NamedVariable]:
        """What is equal on all replicas: weights, also frozen ones, and all of the optimizers but the accumulators."""
        found = {
            f"{variable.kind}/{variable.key}": self._named(variable.variable)
            for variable in self._variables
            if variable.kind == WEIGHT
        }
        for index, optimizer in enumerate(self.optimizers):
            for number, variable in enumerate(optimizer.variables):
                found[f"optimizer/{index}.{optimizer.kind}/{number}"] = self._named(variable)
        return found

    @cached_property
    def own(self) -> dict[str, NamedVariable]:
        """What each replica has for itself, but for metrics and what compression remembers."""
        found = {
            f"{variable.kind}/{variable.key}": self._named(
                variable.variable, "first" if variable.kind == SEED else "mean"
            )
            for variable in self._variables
            if variable.kind != WEIGHT
        }
        for index, optimizer in enumerate(self.optimizers):
            for number, variable in enumerate(optimizer.accumulators):
                found[f"{ACCUMULATORS}{index}/{number}"] = self._named(variable, "sum")
        return found | {f"{GENERATORS}{name}": self._named(state) for name, state in generator_variables().items()}

    @cached_property
    def metrics(self) -> dict[str, NamedVariable]:
        """The states of the metrics and of the trackers of losses."""
        return {
            f"{METRICS}{key}": self._named(variable, "total" if variable.aggregation == "sum" else "first")
            for key, variable in metric_variables_by_key(self._model).items()
        }

    def keys(self) -> dict[int, str]:
        """The keys of the model's variables by `id(variable)`."""
        return {id(found.variable): f"{found.kind}/{found.key}" for found in self._variables}

    @cached_property
    def _variables(self) -> list[ModelVariable]:
        return model_variables(self._model)

    def _named(self, variable: Any, rule: Rule = "first") -> NamedVariable:
        return NamedVariable(path_of(variable), components(self._strategy, variable), rule)


def signatures(variables: Mapping[str, NamedVariable], aside: Iterable[str] = ()) -> dict[str, Signature]:
    """The signatures of variables but for those whose names begin with one of `aside`."""
    return {name: variable.signature for name, variable in variables.items() if not name.startswith(tuple(aside))}


def saved_signatures(
    arrays: Mapping[str, np.ndarray], paths: Mapping[str, str], aside: Iterable[str] = ()
) -> dict[str, Signature]:
    """The signatures of saved arrays, in the order of `paths`, which tells the path of each."""
    names = [name for name in paths if name in arrays] + sorted(set(arrays) - set(paths))
    return {
        name: Signature(tuple(arrays[name].shape), arrays[name].dtype.name, paths.get(name, ""))
        for name in names
        if not name.startswith(tuple(aside))
    }
