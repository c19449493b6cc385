"""Copies the variables of a training to host memory, compares them with a checkpoint, and restores them bit by bit."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tfdist.keras_internals.model_state import OptimizerState, components
from tfdist.recovery.compatibility import (
    Mismatch,
    find_optimizer_mismatch,
    find_variable_mismatch,
    mismatch_error,
)
from tfdist.recovery.compression_arrays import COMPRESSION, CompressionArrays
from tfdist.recovery.random_generators import create_generators
from tfdist.recovery.resharding import (
    AccumulationProgress,
    convert_micro_steps,
    group_by_variable,
    replica_name,
    reshard,
)
from tfdist.recovery.trained_model import Trained
from tfdist.recovery.variable_copies import HostCopies, HostViews, WorkerCopies
from tfdist.recovery.variable_names import (
    ACCUMULATORS,
    EXACT_WEIGHTS,
    GENERATORS,
    NamedVariable,
    NamedVariables,
    variable_specs,
)
from tfdist.recovery.worker_tensors import assign_all, multiply
from tfdist.training.strategy_protocol import training_strategy

Json = dict[str, Any]
Arrays = Mapping[str, np.ndarray]


class VariableSnapshots:
    """The variables of the training of a model, or of a custom loop, under names that stay in a new process.

    A name is the position of a variable: `weights/3.Dense/0` is the first weight of layer 3, a Dense layer, where the
    model is layer 0; `optimizer/0.Adam/2` is the third variable of its optimizer.

    `shared` values are equal on all replicas and saved once: weights, slots, iterations, learning rate, averages, the
    loss scale. `per_replica` values are saved by each rank under the number of the replica over all workers
    (`state/2.BatchNormalization/0@3`): accumulators, compression state, moving statistics and other non-trainable
    variables, seed generators, metrics.

    Arrays never share memory with a variable.

    >>> import keras
    >>> from tfdist.recovery.trained_model import TrainedModel
    >>> from tfdist.recovery.variable_snapshots import VariableSnapshots
    >>> def training(name):
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name=name)])
    ...     model.compile("sgd", loss="mse")
    ...     variables = VariableSnapshots(TrainedModel(model))
    ...     variables.build((tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])))
    ...     return model, variables
    >>> import tensorflow as tf
    >>> model, variables = training("first")
    >>> shared, per_replica, description = variables.snapshot()
    >>> sorted(shared)
    ['optimizer/0.SGD/0', 'optimizer/0.SGD/1', 'weights/2.Dense/0', 'weights/2.Dense/1']
    >>> other, variables = training("second")
    >>> variables.check(shared, per_replica, description)
    >>> variables.restore_shared(shared, description)
    >>> variables.restore_per_replica(per_replica, description)
    >>> bool(np.array_equal(other.get_weights()[0], model.get_weights()[0]))
    True
    """

    def __init__(self, trained: Trained, copies: HostCopies | HostViews | WorkerCopies | None = None) -> None:
        """Reads what is trained. Variables that are created later are found, too.

        `copies` makes the copies when its `finish` is called. None: copies are made at once, in new memory. Those that
        `WorkerCopies` makes on workers are not returned.
        """
        self._trained, self._strategy = trained, trained.strategy
        self._copies = copies
        strategy = training_strategy(self._strategy)
        self._rank, self._num_replicas = strategy.rank, int(self._strategy.num_replicas_in_sync)
        counts = list(strategy.replicas_of_workers)
        self._first_replica = sum(counts[: self._rank])
        # Equal on all ranks; a number unless the workers have different numbers of replicas.
        self._local_replicas = counts[0] if len(set(counts)) == 1 else counts

    def build(self, element_spec: Any = None) -> None:
        """Creates the variables that Keras would create in the first step. Call this before `check`.

        `element_spec` is that of the plain or distributed dataset. It is not needed if model, losses and metrics are
        built, as Keras does before training under a strategy.

        Raises:
            RuntimeError: If variables are missing and the shapes of a batch are not known.
        """
        self._trained.build(element_spec)

    def per_replica(self) -> Arrays:
        """Returns copies of the values of each local replica, including metrics."""
        return self._per_replica(NamedVariables(self._trained))

    def snapshot(self) -> tuple[Arrays, Arrays, Json]:
        """Returns copies of what is equal on all replicas, `per_replica`, and a description.

        The description is what else is needed to check and restore a checkpoint, as JSON; the same on all ranks. Its
        `accumulation_steps` is the number of micro-steps per update of the model's optimizer.
        """
        named = NamedVariables(self._trained)
        shared = self._copy({name: variable.components[0] for name, variable in named.shared.items()})
        return shared, self._per_replica(named), self._description(named)

    def check(self, shared: Arrays, per_replica: Arrays, description: Json) -> None:
        """Compares a checkpoint with this training, without changing a variable.

        Optimizers that the first step would build (of a model with several) are built as in the checkpoint. The
        arguments are what was saved; `per_replica` is that of any rank if the number of replicas differs.

        Raises:
            ValueError: If the optimizer, a variable or the compression differs; the message names the first
                difference, its values in checkpoint and program, and the remedy.
        """
        self._build_optimizers(description)
        named = NamedVariables(self._trained)
        paths, present = description["paths"], {**named.per_replica, **named.metrics}
        of_one_replica = {
            name: next(iter(values.values()))
            for name, values in group_by_variable(per_replica).items()
            if name in present or not self._trained.creates_later(name)
        }
        # Exact weights replace what weights were rounded to, if they are saved and needed. Global generators are
        # created and removed as the checkpoint requires.
        accumulators = [ACCUMULATORS] if _may_lack_accumulators(named, description) else []
        ignored = ([EXACT_WEIGHTS, *accumulators], [GENERATORS, COMPRESSION, *accumulators])
        mismatch = (
            find_optimizer_mismatch(description["optimizers"], self._description(named)["optimizers"])
            or _find_split_mismatch(named, shared, description)
            or find_variable_mismatch(shared, paths, variable_specs(named.shared), ignored[0])
            or find_variable_mismatch(of_one_replica, paths, variable_specs(present), ignored[1])
            or self._compression(named).find_mismatch(per_replica, description.get("compressing_ways", 1))
        )
        if mismatch is not None:
            raise mismatch_error(mismatch)

    def restore_shared(self, shared: Arrays, description: Json) -> None:
        """Restores what is equal on all replicas, on all local ones.

        If the number of micro-steps per update differs, the count of micro-steps is converted so that the number of
        updates stays.
        """
        self._complete_exchanges()
        named = NamedVariables(self._trained)
        present = {name: variable for name, variable in named.shared.items() if name in shared}
        assign_all([(part, shared[name]) for name, variable in present.items() for part in variable.components])
        _rescale_accumulators(self._strategy, named, shared, description, are_split=True)
        for optimizer, saved in zip(named.optimizers, description["optimizers"], strict=True):
            if optimizer.accumulation_steps != saved["accumulation_steps"]:
                for component in components(self._strategy, optimizer.counter):
                    component.assign(_accumulation_progress(optimizer, saved).micro_steps)

    def restore_per_replica(self, per_replica: Arrays, description: Json) -> None:
        """Restores the values of each replica, without the metrics.

        If the replicas are those of the checkpoint, each gets its own values of this rank. Otherwise those of all ranks
        (`merge_ranks`) are needed: accumulators and residuals keep their sums over all replicas, moving statistics
        become the mean (they are equal under tfdist's strategies), and all seed generators resume at the state of
        replica 0.

        Raises:
            ValueError: If the values of needed ranks are missing.
        """
        saved = group_by_variable(per_replica)
        generators = {name: values for name, values in saved.items() if name.startswith(GENERATORS)}
        are_of_replicas = {name.removeprefix(GENERATORS): len(values) > 1 for name, values in generators.items()}
        create_generators(are_of_replicas, self._strategy)
        named = NamedVariables(self._trained)
        self._assign(named.per_replica, saved, description)
        _rescale_accumulators(self._strategy, named, saved, description, are_split=False)
        self._compression(named).restore(per_replica, description["compressing_replicas"])
        if (updates := self._local_updates) is not None:  # on other workers from the last exchange
            updates.resume(same_workers=self._has_replicas_of(description))

    def restore_metrics(self, per_replica: Arrays, description: Json) -> None:
        """Restores the metrics of a resumed epoch. Call this in `on_epoch_begin`, after Keras has reset them.

        If the number of replicas differs, replica 0 gets the sums of all and the others zeros, so that the results
        over all replicas stay.
        """
        named = NamedVariables(self._trained)
        self._assign(named.metrics, group_by_variable(per_replica), description)

    def metric_totals(self, per_replica: Arrays) -> tuple[list[Any], list[np.ndarray]]:
        """Returns the variables of metrics that are exchanged in each step, with the sums of what all replicas saved.

        `per_replica` is merged from all ranks (`merge_ranks`).
        """
        saved, found = group_by_variable(per_replica), NamedVariables(self._trained).exchanged_metrics()
        names = [name for name in found if name in saved]
        return [found[name] for name in names], [reshard(saved[name], "total", 0, 1) for name in names]

    def _build_optimizers(self, description: Json) -> None:
        named = NamedVariables(self._trained)
        by_key = named.variables_by_key()
        # An outer optimizer builds its inner one, which comes later.
        for optimizer, saved in zip(named.optimizers, description["optimizers"], strict=False):
            keys = saved.get("trainable", [])
            if keys and optimizer.kind == saved["kind"] and all(key in by_key for key in keys):
                optimizer.build([by_key[key] for key in keys], self._strategy)

    def _description(self, named: NamedVariables) -> Json:
        keys = named.model_keys()
        variables = {**named.shared, **named.per_replica, **named.metrics}
        return {
            "replicas": self._num_replicas,
            "local_replicas": self._local_replicas,
            "compressing_replicas": self._compression(named).num_replicas,
            "compressing_ways": self._compression(named).ways,
            "accumulation_steps": 1 if (accumulation := self._trained.accumulation()) is None else accumulation.steps,
            "optimizers": [
                {
                    "kind": optimizer.kind,
                    "settings": optimizer.settings,
                    "accumulation_steps": optimizer.accumulation_steps,
                    "micro_steps": optimizer.micro_steps,
                    "trainable": [keys.get(id(variable), "") for variable in optimizer.trainable_variables],
                }
                for optimizer in named.optimizers
            ],
            "paths": {name: variable.path for name, variable in variables.items()},
        }

    def _per_replica(self, named: NamedVariables) -> Arrays:
        first = self._first_replica
        present = {
            replica_name(name, first + index): component
            for name, variable in {**named.per_replica, **named.metrics}.items()
            for index, component in enumerate(variable.components)
        }
        return self._copy({**present, **self._compression(named).variables()})

    def _copy(self, variables: Mapping[str, Any]) -> Arrays:
        self._complete_exchanges()
        copies = self._copies or HostCopies()
        requested = {name: copies.request(name, variable) for name, variable in variables.items()}
        if self._copies is None:
            copies.finish()
        return {name: array for name, array in requested.items() if array is not None}

    def _assign(
        self,
        variables: Mapping[str, NamedVariable],
        saved: Mapping[str, Mapping[int, np.ndarray]],
        description: Json,
    ) -> None:
        first = self._first_replica
        same = self._has_replicas_of(description)
        assignments: list[tuple[Any, Any]] = []
        for name, variable in variables.items():
            if name not in saved:
                continue
            values = saved[name]
            has_all = first in values if same else len(values) == description["replicas"]
            if not has_all and (same or variable.rule in ("sum", "total")):
                expected = f"replica {first}" if same else f"all {description['replicas']} replicas"
                raise ValueError(
                    f"Shards of other ranks are missing. Received: {name!r} of the replicas {sorted(values)}. "
                    f"Expected: {expected}. Pass the shard of this rank, or, if the number of replicas has changed, "
                    "the result of `merge_ranks` for the shards of all ranks."
                )
            for replica, component in enumerate(variable.components, first):
                value = values[replica] if same else reshard(values, variable.rule, replica, self._num_replicas)
                assignments.append((component, value))
        assign_all(assignments)

    @property
    def _local_updates(self) -> Any:
        return training_strategy(self._strategy).local_updates

    def _complete_exchanges(self) -> None:
        """Waits for exchanges that are under way, which change residuals and whose sums are saved."""
        if (updates := self._local_updates) is not None:
            updates.hold()

    def _has_replicas_of(self, description: Json) -> bool:
        return (description["replicas"], description["local_replicas"]) == (self._num_replicas, self._local_replicas)

    def _compression(self, named: NamedVariables) -> CompressionArrays:
        return CompressionArrays(self._trained, named.model_keys(), self._rank, named.local_replicas)


def _accumulation_progress(optimizer: OptimizerState, saved: Json) -> AccumulationProgress:
    """Returns where accumulation resumes."""
    return convert_micro_steps(saved["micro_steps"], saved["accumulation_steps"], optimizer.accumulation_steps)


def _may_lack_accumulators(named: NamedVariables, description: Json) -> bool:
    """Whether accumulators may exist on one side only.

    That is so between two updates, when they are zero, and if the number of micro-steps of an update differs.
    """
    saved_steps = [described["accumulation_steps"] for described in description["optimizers"]]
    steps = [optimizer.accumulation_steps for optimizer in named.optimizers]
    return saved_steps != steps or _is_between_updates(description)


def _find_split_mismatch(named: NamedVariables, shared: Collection[str], description: Json) -> Mismatch | None:
    """Returns the difference if sums of an unfinished update are split over the replicas on one side only."""
    saved, present = (any(name.startswith(ACCUMULATORS) for name in side) for side in (shared, named.shared))
    have_some = any(described["accumulation_steps"] > 1 for described in description["optimizers"]) and any(
        optimizer.accumulators for optimizer in named.optimizers
    )
    if saved == present or not have_some or _is_between_updates(description):
        return None
    kinds = ["split over the replicas" if is_split else "whole on each replica" for is_split in (saved, present)]
    return Mismatch("where the sums of gradients of an unfinished update are", *kinds)


def _rescale_accumulators(
    strategy: Any, named: NamedVariables, saved: Mapping[str, Any], description: Json, *, are_split: bool
) -> None:
    """Converts restored sums to the number of micro-steps of the program; those that were not saved become zero.

    Those that are split over the replicas are converted if `are_split`, the others if not.
    """
    for index, (optimizer, described) in enumerate(zip(named.optimizers, description["optimizers"], strict=True)):
        for number, accumulator in enumerate(optimizer.accumulators):
            name = f"{ACCUMULATORS}{index}/{number}"
            if (name in named.shared) != are_split:
                continue
            factor = _accumulation_progress(optimizer, described).factor if name in saved else 0.0
            multiply(components(strategy, accumulator), factor)


def _is_between_updates(description: Json) -> bool:
    return not any(
        described["micro_steps"] % described["accumulation_steps"] for described in description["optimizers"]
    )
