"""What the steps of a custom loop write, and what a worker that joins takes over: variables and Python state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.shard import Shard
from tfdist.collectives.compression_state import SUMMED_ENTRIES
from tfdist.keras_internals.model_introspection import batch_statistics
from tfdist.keras_internals.model_state import OptimizerState, components, model_variables, optimizers_of
from tfdist.recovery.random_generators import (
    create_generators,
    generator_variables,
    python_and_numpy_state,
    restore_python_and_numpy,
)
from tfdist.utils.json_state import from_json, to_json

_VARIABLE, _TOTAL, _COMPRESSION, _GENERATOR = "variable", "total", "compression", "generator/"


class LoopState:
    """The objects that a custom loop trains.

    Args:
        objects: Models, layers, optimizers, metrics, variables, random generators, objects with `get_state` and
            `set_state`, and lists, tuples and dicts of these.
        strategy: The strategy in whose scope they were created. It has `compression_state`.
        totals: The strategy's `MetricTotals`.
        sum_over_workers: Returns the sum of the workers' tensors.

    Raises:
        ValueError: One of them is none of these, or cannot be taken back or sent.
    """

    def __init__(
        self, objects: Any, strategy: Any, totals: Any, sum_over_workers: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        self._strategy, self._totals, self._sum = strategy, totals, sum_over_workers
        self._with_python_state: list[Any] = []
        self._metrics: list[Any] = []
        found = [variable for one in _flat(objects) for variable in self._variables_of(one)]
        ids = set(map(id, self._of_metrics()))
        self._owned = _unique([variable for variable in found if id(variable) not in ids])
        for metric in self._metrics:
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

    def snapshot(self) -> Shard:
        """Returns the present state, as it is sent to a worker that joins."""
        arrays = {f"{_VARIABLE}/{index}": one.numpy() for index, one in enumerate(self._of_objects())}
        arrays |= {f"{_GENERATOR}{name}": ones[0].numpy() for name, ones in self._of_generators().items()}
        for index, total in enumerate(self._totals.of(self._summed())):
            if total is not None:
                arrays[f"{_TOTAL}/{index}"] = total.numpy()
        entries: list[list[str]] = []
        for replica in self._strategy.compression_state.replicas.values():  # one: the first device exchanges
            for path, values in replica.entries.items():
                for name, value in values.items():
                    arrays[f"{_COMPRESSION}/{len(entries)}"] = value.numpy()
                    entries.append([path, name])
        python_state = [to_json(one.get_state(), name=type(one).__name__) for one in self._with_python_state]
        metadata = {"python_state": python_state, "compression": entries, "generators": python_and_numpy_state()}
        return Shard(arrays, metadata)

    def restore(self, shard: Shard) -> None:
        """Takes over what the `snapshot` of another worker has returned. This worker has counted nothing in metrics.

        Raises:
            ValueError: That worker has other objects; nothing is changed in that case.
        """
        arrays, metadata, variables = shard.tensors, shard.metadata, self._of_objects()
        names = [name for name in (f"{_VARIABLE}/{index}" for index in range(len(arrays))) if name in arrays]
        received = [_described(arrays[name]) for name in names]
        expected = [_described(variable) for variable in variables]
        python_state = metadata["python_state"]
        if received != expected or len(python_state) != len(self._with_python_state):
            differing = next((pair for pair in zip(received, expected, strict=False) if pair[0] != pair[1]), None)
            raise ValueError(
                "The state of an ElasticLoop differs from that of the workers that train. Received: "
                f"{len(received)} variables and {len(python_state)} objects with `get_state`"
                f"{'' if differing is None else f', of which one has {differing[0]}'}. Expected: {len(expected)} and "
                f"{len(self._with_python_state)}{'' if differing is None else f', with {differing[1]} in its place'}. "
                "Run the same program on all workers, and give the loop the same objects in the same order."
            )
        for name, variable in zip(names, variables, strict=True):
            variable.assign(arrays[name])
        generators = [name.removeprefix(_GENERATOR) for name in arrays if name.startswith(_GENERATOR)]
        create_generators(generators, self._strategy)
        for name in generators:
            for one in self._of_generators()[name]:
                one.assign(arrays[f"{_GENERATOR}{name}"])
        totals = [(one, arrays.get(f"{_TOTAL}/{index}")) for index, one in enumerate(self._summed())]
        known = [(one, tf.convert_to_tensor(total)) for one, total in totals if total is not None]
        self._totals.store([one for one, _ in known], [total for _, total in known])
        for variable in self._of_metrics():
            for local in _local(variable):
                local.assign(tf.zeros_like(local))
        self._restore_compression(arrays, metadata["compression"])
        for one, state in zip(self._with_python_state, python_state, strict=True):
            one.set_state(from_json(state))
        restore_python_and_numpy(metadata["generators"])

    def _restore_compression(self, arrays: Mapping[str, np.ndarray], entries: Sequence[Sequence[Any]]) -> None:
        """What a worker has not sent yet stays there: this one begins without residuals."""
        values: dict[str, dict[str, tf.Tensor]] = {}
        for index, (path, name) in enumerate(entries):
            value = tf.convert_to_tensor(arrays[f"{_COMPRESSION}/{index}"])
            values.setdefault(path, {})[name] = tf.zeros_like(value) if name in SUMMED_ENTRIES else value
        if values:
            device = self._strategy.extended.worker_devices[0]
            self._strategy.compression_state.replica_state(self._strategy.rank, device).load(values)

    def _of_objects(self) -> list[Any]:
        return [one for variable in self._owned for one in components(self._strategy, variable)]

    def _of_metrics(self) -> list[Any]:
        return _unique([variable for metric in self._metrics for variable in metric.variables])

    def _summed(self) -> list[Any]:
        """Returns the variables of metrics whose sums are stored after each step."""
        found = self._of_metrics()
        size = sum(one.shape.num_elements() * _dtype(one).size for one in found)
        return found if size <= self._totals.largest_bytes else []

    def _equal(self) -> list[Any]:
        """Returns the variables that are equal on all workers between two steps."""
        return [*self._of_objects(), *(one for ones in self._of_generators().values() for one in ones)]

    def _of_generators(self) -> dict[str, list[Any]]:
        """Returns the variables of the global random generators, by name."""
        return {name: components(self._strategy, one) for name, one in generator_variables().items()}

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

    def _variables_of(self, one: Any) -> Iterator[Any]:
        """Yields the variables of an object; collects metrics, and objects with `get_state`."""
        if isinstance(one, keras.layers.Layer):
            _check_layer(one)
            yield from (found.variable for found in model_variables(one))
            if isinstance(one, keras.Model):
                self._metrics += one.metrics
                for optimizer in optimizers_of(one):
                    yield from _optimizer_variables(optimizer)
        elif isinstance(one, keras.optimizers.Optimizer):
            yield from _optimizer_variables(one)
            for inner in (getattr(one, "inner_optimizer", None), *getattr(one, "optimizers", ())):
                if inner is not None:
                    yield from self._variables_of(inner)
        elif isinstance(one, keras.metrics.Metric):
            self._metrics.append(one)
        elif isinstance(one, keras.Variable | tf.Variable):
            yield one
        elif isinstance(one, keras.random.SeedGenerator | tf.random.Generator):
            yield one.state
        elif callable(getattr(one, "get_state", None)) and callable(getattr(one, "set_state", None)):
            self._with_python_state.append(one)
        else:
            raise ValueError(
                "The state of an ElasticLoop consists of what its steps write, and a worker that joins takes over. "
                f"Received: {one!r}. Expected: models, layers, optimizers, metrics, variables, random generators, "
                "objects with `get_state` and `set_state`, and lists, tuples and dicts of these. Give the objects "
                "themselves; hold numbers in a `tf.Variable`, or in an object with these methods."
            )


def _optimizer_variables(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer, which must exist before the first step.

    Raises:
        ValueError: They do not, or it accumulates gradients.
    """
    state = OptimizerState(optimizer)
    if not optimizer.built:
        raise ValueError(
            "The variables of an optimizer must exist before the first step of an elastic loop, to be taken back and "
            f"sent. Received: {type(optimizer).__name__}, which is not built. Expected: one that is. Call "
            "`optimizer.build(model.trainable_variables)` in the scope of the strategy."
        )
    if state.accumulation_steps > 1:
        raise ValueError(
            "Accumulated gradients of a lost worker would be lost with it. Received: an optimizer that accumulates "
            f"over {state.accumulation_steps} micro-steps, in an elastic loop. Expected: an update in each step. Add "
            "up the gradients of several parts of a batch within the step, or use larger batches."
        )
    return state.variables


def _check_layer(layer: Any) -> None:
    if not layer.built:
        raise ValueError(
            "The variables of a model must exist before the first step of an elastic loop, to be taken back and sent. "
            f"Received: {type(layer).__name__} {layer.name!r}, which is not built. Expected: one that is. Give the "
            "model a `keras.Input`, or call `model.build(shape)` in the scope of the strategy."
        )
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


def _flat(objects: Any) -> Iterator[Any]:
    if isinstance(objects, Mapping):
        objects = list(objects.values())
    if isinstance(objects, list | tuple):
        for one in objects:
            yield from _flat(one)
    else:
        yield objects


def _unique(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _value(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _dtype(variable: Any) -> tf.DType:
    return tf.as_dtype(_value(variable).dtype)


def _local(variable: Any) -> Sequence[Any]:
    value = _value(variable)
    return tuple(getattr(value, "values", (value,)))


def _described(value: Any) -> str:
    return f"{tf.as_dtype(value.dtype).name} of shape {list(value.shape)}"
