"""The variables of a training: copied to the host's memory, compared with a checkpoint, and put back, bit by bit."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.model_state import build_for_training, components
from tfdist.keras_internals.optimizer_state import OptimizerState
from tfdist.recovery.comparison import Difference, different_optimizer, different_variable, other_training
from tfdist.recovery.compression_state import PREFIX as COMPRESSION
from tfdist.recovery.compression_state import CompressionArrays
from tfdist.recovery.generators import make_as_saved
from tfdist.recovery.host_copies import HostCopies
from tfdist.recovery.inventory import (
    ACCUMULATORS,
    GENERATORS,
    Inventory,
    NamedVariable,
    saved_signatures,
    signatures,
)
from tfdist.recovery.micro_steps import MicroSteps, converted
from tfdist.recovery.replicas import by_name, name_of, share

Json = dict[str, Any]
Arrays = Mapping[str, np.ndarray]


class TrainingVariables:
    """The variables of the training of one model, under names that the same program finds again in a new process.

    Names tell a variable's place: `weights/3.Dense/0` is the first weight of layer 3, a Dense, where the model is
    layer 0; `optimizer/0.Adam/2` the third variable of its optimizer. What is equal on all replicas is saved once
    (`shared`): weights, slots, iterations, learning rate, averages, the loss scale. What each replica has for itself is
    saved by each rank (`own`), under the replica's number over all workers (`state/2.BatchNormalization/0@3`):
    accumulators, what compression remembers, moving statistics and other variables that are not trained, seed
    generators, metrics.

    Copies do not share memory with a variable, neither what is saved nor what is restored.

    >>> import keras
    >>> from tfdist.recovery.variables import TrainingVariables
    >>> def training(name):
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name=name)])
    ...     model.compile("sgd", loss="mse")
    ...     variables = TrainingVariables(model)
    ...     variables.build((tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])))
    ...     return model, variables
    >>> import tensorflow as tf
    >>> model, variables = training("first")
    >>> shared, own, description = variables.shared(), variables.own(), variables.description()
    >>> sorted(shared)
    ['optimizer/0.SGD/0', 'optimizer/0.SGD/1', 'weights/2.Dense/0', 'weights/2.Dense/1']
    >>> other, variables = training("second")
    >>> variables.check(shared, own, description)
    >>> variables.restore_shared(shared, description)
    >>> variables.restore_own(own, description)
    >>> bool(np.array_equal(other.get_weights()[0], model.get_weights()[0]))
    True
    """

    def __init__(self, model: Any, copies: HostCopies | None = None) -> None:
        """Looks at `model`, a compiled Keras model; variables that are made later are found, too.

        Args:
          model: a compiled Keras model.
          copies: makes the copies, when its `finish` is called. If None, they are made at once, in memory of their own.
        """
        self._model = model
        self._copies = copies
        self._strategy = model.distribute_strategy
        self._rank = int(getattr(self._strategy, "rank", 0))

    def build(self, element_spec: Any = None) -> None:
        """Makes the variables that Keras would make in the first step; to be called before `check`.

        Args:
          element_spec: of the batches, as `tf.data.Dataset.element_spec` gives it, distributed or not; needed unless
            model, losses and metrics have been built already, as Keras does before training under a strategy.

        Raises:
          RuntimeError: variables are missing, and the shapes of a batch are not known.
        """
        build_for_training(self._model, element_spec)

    def description(self) -> Json:
        """What else must be known to check and to restore a checkpoint, as JSON; the same on all ranks.

        Its `accumulation_steps` tells how many micro-steps make an update of the model's optimizer.
        """
        return self._description(Inventory(self._model))

    def shared(self) -> Arrays:
        """Copies of what is equal on all replicas."""
        return self._shared(Inventory(self._model))

    def own(self) -> Arrays:
        """Copies of what the local replicas have for themselves, metrics included."""
        return self._own(Inventory(self._model))

    def everything(self) -> tuple[Arrays, Arrays, Json]:
        """What `shared`, `own` and `description` return, in the time of one of them."""
        inventory = Inventory(self._model)
        return self._shared(inventory), self._own(inventory), self._description(inventory)

    def check(self, shared: Arrays, own: Arrays, description: Json) -> None:
        """Compares a checkpoint with this training, without touching a variable.

        Args:
          shared: what `shared` returned when it was saved.
          own: what `own` returned then on this rank; on any, if there are other replicas now.
          description: what `description` returned.

        Raises:
          ValueError: the optimizer, a variable or the compression differs; the message names the first difference, what
            the checkpoint has, what is expected, and what to do.
        """
        inventory = Inventory(self._model)
        difference = (
            different_optimizer(description["optimizers"], self._description(inventory)["optimizers"])
            or different_variable(saved_signatures(shared, description["paths"]), signatures(inventory.shared))
            or self._different_own(inventory, own, description)
        )
        if difference is not None:
            raise other_training(difference)

    def restore_shared(self, shared: Arrays, description: Json) -> None:
        """Puts back what is equal on all replicas, on all local ones.

        Where an update is made of another number of micro-steps now, the count of micro-steps is converted so that the
        number of updates stays.
        """
        inventory = Inventory(self._model)
        for name, variable in inventory.shared.items():
            for component in variable.components:
                component.assign(shared[name])
        for optimizer, saved in zip(inventory.optimizers, description["optimizers"], strict=True):
            if optimizer.accumulation_steps != saved["accumulation_steps"]:
                for component in components(self._strategy, optimizer.counter):
                    component.assign(_converted(optimizer, saved).done)

    def restore_own(self, own: Arrays, description: Json) -> None:
        """Puts back what each replica has for itself, but for the metrics.

        With as many replicas as in the checkpoint, laid out as they were, each takes its own. Otherwise accumulators
        and residuals are shared out so that their sums over all replicas stay, moving statistics are the replicas' mean
        (they are equal under tfdist's strategies), and all seed generators go on where replica 0's was.

        Args:
          own: of this rank; of all ranks (`merge`) if there are other replicas now.
          description: of the checkpoint.

        Raises:
          ValueError: shards of ranks are missing that are needed.
        """
        saved = by_name(own)
        generators = [name.removeprefix(GENERATORS) for name in saved if name.startswith(GENERATORS)]
        make_as_saved(generators, self._strategy)
        inventory = Inventory(self._model)
        self._assign(inventory.own, inventory.local_replicas, saved, description)
        optimizers = zip(inventory.optimizers, description["optimizers"], strict=True)
        for index, (optimizer, described) in enumerate(optimizers):
            for number, accumulator in enumerate(optimizer.accumulators):
                factor = _converted(optimizer, described).factor if f"{ACCUMULATORS}{index}/{number}" in saved else 0.0
                for component in components(self._strategy, accumulator) if factor != 1.0 else ():
                    component.assign(component * factor)
        self._compression(inventory).load(own, description["compressing_replicas"])

    def restore_metrics(self, own: Arrays, description: Json) -> None:
        """Puts back the metrics of an epoch that goes on; to be called after Keras has reset them, in `on_epoch_begin`.

        On other replicas than before, replica 0 takes the sums of all, and the others begin with nothing: the results
        over all replicas are what they would have been.

        Args:
          own: as for `restore_own`.
          description: of the checkpoint.

        Raises:
          ValueError: shards of ranks are missing that are needed.
        """
        inventory = Inventory(self._model)
        self._assign(inventory.metrics, inventory.local_replicas, by_name(own), description)

    def _description(self, inventory: Inventory) -> Json:
        everything = {**inventory.shared, **inventory.own, **inventory.metrics}
        return {
            "replicas": self._replicas,
            "local_replicas": inventory.local_replicas,
            "compressing_replicas": self._compression(inventory).replicas,
            "accumulation_steps": Accumulation(self._model).steps if self._model.optimizer is not None else 1,
            "optimizers": [
                {
                    "kind": optimizer.kind,
                    "meaning": optimizer.meaning,
                    "accumulation_steps": optimizer.accumulation_steps,
                    "micro_steps": optimizer.micro_steps,
                }
                for optimizer in inventory.optimizers
            ],
            "paths": {name: variable.path for name, variable in everything.items()},
        }

    def _shared(self, inventory: Inventory) -> Arrays:
        return self._copied({name: variable.components[0] for name, variable in inventory.shared.items()})

    def _own(self, inventory: Inventory) -> Arrays:
        first = self._rank * inventory.local_replicas
        present = {
            name_of(name, first + index): component
            for name, variable in {**inventory.own, **inventory.metrics}.items()
            for index, component in enumerate(variable.components)
        }
        return self._copied({**present, **self._compression(inventory).variables()})

    def _copied(self, variables: Mapping[str, Any]) -> Arrays:
        copies = self._copies or HostCopies()
        arrays = {name: copies.of(name, variable) for name, variable in variables.items()}
        if self._copies is None:
            copies.finish()
        return arrays

    @property
    def _replicas(self) -> int:
        return int(self._strategy.num_replicas_in_sync)

    def _different_own(self, inventory: Inventory, own: Arrays, description: Json) -> Difference | None:
        # Global generators are made or forgotten as the checkpoint has it. Another number of micro-steps may need
        # accumulators that the checkpoint does not have, or the other way round.
        aside = [GENERATORS, COMPRESSION]
        saved_steps = [described["accumulation_steps"] for described in description["optimizers"]]
        if saved_steps != [optimizer.accumulation_steps for optimizer in inventory.optimizers]:
            aside.append(ACCUMULATORS)
        one_each = {name: next(iter(values.values())) for name, values in by_name(own).items()}
        present = {**inventory.own, **inventory.metrics}
        return different_variable(
            saved_signatures(one_each, description["paths"], aside), signatures(present, aside)
        ) or self._compression(inventory).difference(own)

    def _assign(
        self,
        variables: Mapping[str, NamedVariable],
        local: int,
        saved: Mapping[str, Mapping[int, np.ndarray]],
        description: Json,
    ) -> None:
        first = self._rank * local
        same = (description["replicas"], description["local_replicas"]) == (self._replicas, local)
        for name, variable in variables.items():
            if name not in saved:
                continue
            values = saved[name]
            complete = first in values if same else len(values) == description["replicas"]
            if not complete and (same or variable.rule in ("sum", "total")):
                expected = f"replica {first}" if same else f"all {description['replicas']} replicas"
                raise ValueError(
                    f"Shards of other ranks are needed. Received: {name!r} of the replicas {sorted(values)}. Expected: "
                    f"of {expected}. Give this rank's own shard, or, where the number of replicas has changed, what "
                    "`merge` makes of the shards of all ranks."
                )
            for replica, component in enumerate(variable.components, first):
                if same:
                    component.assign(values[replica])
                else:
                    component.assign(share(values, variable.rule, replica, self._replicas))

    def _compression(self, inventory: Inventory) -> CompressionArrays:
        return CompressionArrays(self._model, inventory.keys(), self._rank, inventory.local_replicas)


def _converted(optimizer: OptimizerState, saved: Json) -> MicroSteps:
    return converted(saved["micro_steps"], saved["accumulation_steps"], optimizer.accumulation_steps)
