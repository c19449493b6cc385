"""What the steps of a custom loop write, and what a worker that joins takes over: variables and Python state."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.elastic.received_state import ReceivedState
from tfdist.keras_internals.model_introspection import batch_statistics
from tfdist.keras_internals.model_state import OptimizerState, components
from tfdist.recovery.random_generators import generator_variables
from tfdist.recovery.trained_objects import ObjectStates, TrainedObjects
from tfdist.recovery.training_state import Snapshot, TrainingState
from tfdist.recovery.variable_copies import HostViews
from tfdist.recovery.variable_names import GENERATORS, NamedVariables
from tfdist.utils.json_state import from_json, to_json

_TIMEOUT_SECONDS = 60.0  # for variables of other processes, of which there are none


class LoopState:
    """The objects that an elastic loop trains: those of `TrainedObjects`, whose variables exist already.

    Args:
        objects: As for `TrainedObjects`.
        strategy: The strategy in whose scope they were created. It has `compression_state`.
        totals: The strategy's `MetricTotals`.
        sum_over_workers: Returns the sum of the workers' tensors.

    Raises:
        ValueError: One of them cannot be saved, taken back or sent.
    """

    def __init__(
        self, objects: Any, strategy: Any, totals: Any, sum_over_workers: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        self._strategy, self._totals, self._sum = strategy, totals, sum_over_workers
        self._trained = TrainedObjects(objects, strategy)
        for layer in self._trained.layers:
            _check_statistics(layer)
        for optimizer in self._trained.optimizers():
            _check_optimizer(optimizer)
        named = NamedVariables(self._trained)
        found = {**named.shared, **named.per_replica}
        self._owned = [one for name in found if not name.startswith(GENERATORS) for one in found[name].components]
        for metric in self._trained.metric_objects:
            _call_after_reset(metric, totals.clear)
        self._store_totals = tf.function(self._sum_metrics)

    @property
    def variables(self) -> list[Any]:
        """This worker's `tf.Variable`s that steps may write, besides the sums of metrics."""
        of_metrics = [local for variable in self._of_metrics() for local in _local(variable)]
        return [*self._equal(), *of_metrics, *self._strategy.compression_state.variables]

    def equalize(self, value_of_oldest: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Gives all workers the values of the oldest, apart from metrics. All call this."""
        for variable in self._equal():
            variable.assign(value_of_oldest(variable.read_value()))

    def store_metrics(self) -> None:
        """Stores the sums of the metrics over all workers, after a step. All workers call this within the step."""
        if self._summed():
            self._store_totals()

    def snapshot(self) -> Snapshot:
        """Returns the present state, as it is sent to a worker that joins. It shares the memory of the variables."""
        return self._state().snapshot({}, is_chief=True)

    def sums_of_metrics(self) -> list[Any]:
        """Returns the sums of the metrics over all workers, as JSON."""
        return [None if total is None else to_json(total) for total in self._totals.of(self._summed())]

    def restore(self, received: ReceivedState, rank: int, sums: Sequence[Any]) -> None:
        """Takes over the `snapshot` and the `sums_of_metrics` of another worker. This worker has counted nothing.

        Raises:
            ValueError: That worker has other objects; nothing is changed in that case.
        """
        self._state().restore(received, rank, received.num_ranks, metrics=False)
        totals = [(one, from_json(total)) for one, total in zip(self._summed(), sums, strict=False)]
        known = [(one, tf.convert_to_tensor(total)) for one, total in totals if total is not None]
        self._totals.store([one for one, _ in known], [total for _, total in known])
        for variable in self._of_metrics():
            for local in _local(variable):
                local.assign(tf.zeros_like(local))

    def _state(self) -> TrainingState:
        states = ObjectStates(self._trained.with_state)
        return TrainingState(self._trained, states, timeout_seconds=_TIMEOUT_SECONDS, copies=HostViews())

    def _of_metrics(self) -> list[Any]:
        return list(self._trained.metrics().values())

    def _summed(self) -> list[Any]:
        """Returns the variables of metrics whose sums are stored after each step."""
        return self._trained.exchanged_metrics()

    def _equal(self) -> list[Any]:
        """Returns the variables that are equal on all workers between two steps."""
        generators = [one for state in generator_variables().values() for one in components(self._strategy, state)]
        return [*self._owned, *generators]

    def _sum_metrics(self) -> None:
        sums: dict[int, tf.Tensor] = {}
        summed = self._summed()
        for dtype in {_dtype(variable): None for variable in summed}:  # in the same order on all workers
            members = [one for one in summed if _dtype(one) == dtype]
            locals_ = [tf.add_n([tf.convert_to_tensor(local) for local in _local(one)]) for one in members]
            vector = self._sum(tf.concat([tf.reshape(value, [-1]) for value in locals_], axis=0))
            parts = tf.split(vector, [value.shape.num_elements() for value in locals_])
            for one, value, part in zip(members, locals_, parts, strict=True):
                sums[id(one)] = tf.reshape(part, value.shape)
        self._totals.store(summed, [sums[id(one)] for one in summed])


def _check_optimizer(optimizer: Any) -> None:
    """Refuses optimizers whose variables do not exist yet, and those that accumulate gradients."""
    if not optimizer.built:
        raise ValueError(
            "The variables of an optimizer must exist before the first step of an elastic loop, to be taken back and "
            f"sent. Received: {type(optimizer).__name__}, which is not built. Expected: one that is. Call "
            "`optimizer.build(model.trainable_variables)` in the scope of the strategy."
        )
    if (steps := OptimizerState(optimizer).accumulation_steps) > 1:
        raise ValueError(
            "Accumulated gradients of a lost worker would be lost with it. Received: an optimizer that accumulates "
            f"over {steps} micro-steps, in an elastic loop. Expected: an update in each step. Add up the gradients of "
            "several parts of a batch within the step, or use larger batches."
        )


def _check_statistics(layer: Any) -> None:
    if batch_statistics(layer):
        raise ValueError(
            "Batch statistics differ between the workers of a custom loop, so none could take over those of another. "
            f"Received: {type(layer).__name__} {layer.name!r} with a BatchNormalization that normalizes by the rows of "
            "a replica. Expected: statistics over all replicas. Create the layer with `synchronized=True`, or train by "
            "`fit`, which averages them."
        )


def _call_after_reset(metric: Any, forget: Callable[[Sequence[Any]], None]) -> None:
    """Forgets the sums of a metric when the program resets it."""
    reset = metric.reset_state

    def reset_state() -> None:
        reset()
        forget(metric.variables)

    metric.reset_state = reset_state


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _dtype(variable: Any) -> tf.DType:
    return tf.as_dtype(_value(variable).dtype)


def _local(variable: Any) -> Sequence[Any]:
    value = _value(variable)
    return tuple(getattr(value, "values", (value,)))
