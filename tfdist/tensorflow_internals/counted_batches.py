"""Distributed batches that carry how many of their rows are samples, on each local replica and on all workers.

A step needs these numbers, and TensorFlow asks all workers for each batch whether any has data. If the workers have
agreed that their batches have one static size and end together, nothing is asked: the numbers are known while tracing.
Otherwise one exchange, when a batch is drawn, answers both. A worker without data must take part in the steps of the
others. TensorFlow gives its replicas a batch without rows; where batches have a static size, they get rows of zeros
instead, as many as the others have, which are not samples.

The numbers are a part of the distributed value, so they pass through functions and loops. A batch with them is of
another type than one of TensorFlow, and whatever a user computes from it is not: a function is traced for each of them.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.tensorflow_internals.tensorflow_symbols import regroup

_INPUT = "tensorflow.python.distribute.input_lib"

_PerReplica = private("tensorflow.python.distribute.values:PerReplica", "holds the parts of a batch")
_PerReplicaSpec = private("tensorflow.python.distribute.values:PerReplicaSpec", "the type of such a value")
_Iterator = private(f"{_INPUT}:DistributedIteratorBase", "draws the batches of the replicas")
private(f"{_INPUT}:_calculate_replicas_with_values", "lets all workers agree whether the data has ended")
_values_or_none = private(f"{_INPUT}:_get_value_or_dummy", "gives a replica without data a batch without rows")
_input_lib = private("tensorflow.python.distribute:input_lib", "likewise, as its iterators call it")
private(
    f"{_INPUT}:DistributedIteratorBase._get_next_no_partial_batch_handling", "raises the error at the end of the data"
)


class CountedPerReplica(_PerReplica):  # type: ignore[misc, valid-type]
    """A tensor of each local replica, and how many of its rows are samples.

    Attributes:
        total: The number of samples of all replicas of all workers, an int if it is known while tracing, else an int64
            scalar.
        samples: The numbers of samples of the local replicas, likewise.
        is_filled: Whether replicas without data have rows of zeros instead of no rows.
    """

    def __init__(self, values: Sequence[tf.Tensor], spec: "CountedPerReplicaSpec", counts: tf.Tensor | None) -> None:
        super().__init__(values)
        self._counts, self._total, self.is_filled = counts, spec.total, spec.is_filled

    @property
    def total(self) -> int | tf.Tensor:
        """The number of samples of all replicas of all workers."""
        return self._total if self._counts is None else self._counts[-1]

    @property
    def samples(self) -> tuple[int | tf.Tensor, ...]:
        """The numbers of samples of the local replicas."""
        if self._counts is None:
            return tuple(value.shape[0] for value in self.values)
        return tuple(self._counts[replica] for replica in range(len(self.values)))

    @property
    def _type_spec(self) -> Any:
        return CountedPerReplicaSpec(
            tuple(tf.TensorSpec(value.shape, value.dtype) for value in self._values), self._total, self.is_filled
        )


class CountedPerReplicaSpec(_PerReplicaSpec):  # type: ignore[misc, valid-type]
    """The type of a `CountedPerReplica`.

    Args:
        value_specs: The `tf.TensorSpec`s of its values.
        total: Its number of samples if all rows of all workers are samples; `None` if it is known in the graph only.
        is_filled: See `CountedPerReplica`.
    """

    value_type = property(lambda self: CountedPerReplica)

    def __init__(self, value_specs: Sequence[tf.TensorSpec], total: int | None, is_filled: bool) -> None:
        super().__init__(*value_specs)
        self.total, self.is_filled = total, is_filled

    @property
    def has_static_rows(self) -> bool:
        """Whether the replicas have a static number of rows, also without data."""
        return self.total is not None or self.is_filled

    def _serialize(self) -> Any:
        return self._value_specs, self.total, self.is_filled

    @property
    def _component_specs(self) -> Any:
        counts = [tf.TensorSpec([len(self._value_specs) + 1], tf.int64)]
        return (*self._value_specs, *(counts if self.total is None else ()))

    def _to_components(self, value: Any) -> Any:
        return (*super()._to_components(value), *(() if value._counts is None else (value._counts,)))

    def _from_components(self, components: Any) -> Any:
        values = components[: len(self._value_specs)]
        counts = components[-1] if self.total is None else None
        # The components may be what `tf.nest.map_structure(..., expand_composites=True)` has made of them.
        for value, spec in zip(values, self._value_specs, strict=True):
            if _rows(value) != _rows(spec) and (self.total is not None or None not in (_rows(value), _rows(spec))):
                return _PerReplica(values)
        return CountedPerReplica(values, self, counts)


def can_count(spec: Any) -> bool:
    """Whether the values of a `tf.TypeSpec` of a distributed dataset have rows that can be counted."""
    parts = getattr(spec, "_value_specs", ())
    return bool(parts) and all(isinstance(part, tf.TensorSpec) and bool(part.shape.rank) for part in parts)


def has_static_sizes(dataset: Any) -> bool:
    """Whether the batches of a distributed dataset have a static number of rows, except where the data has ended."""
    specs = tf.nest.flatten(dataset._element_spec)
    return all(can_count(spec) and all(_rows(part) for part in spec._value_specs) for spec in specs)


def is_carrier(dataset: Any) -> bool:
    """Whether batches of a distributed dataset of several workers can carry their numbers of samples."""
    workers = getattr(dataset, "_input_workers", None)
    return workers is not None and len(workers.worker_devices) == 1 and len(tf.nest.flatten(dataset._element_spec)) > 0


def know_ends(dataset: Any) -> Any:
    """Returns a distributed dataset whose iterators take the end of the own data for the end of all workers' data.

    It shares the state of `dataset`, which does not change, like the results of the next three functions.
    """
    knowing = copy.copy(dataset)
    knowing._enable_get_next_as_optional = False
    return knowing


def carry_static_counts(dataset: Any, replicas: int) -> Any:
    """Returns a dataset with `CountedPerReplica` values of a static size: `replicas` of all workers have as many rows.

    Call this for a dataset for which `has_static_sizes` is true, and `know_ends` is right.
    """
    known = know_ends(dataset)
    known._element_spec = tf.nest.map_structure(
        lambda spec: _counted_spec(spec, replicas * int(spec._value_specs[0].shape[0])), dataset._element_spec
    )
    return known


def keep_static_sizes(dataset: Any) -> Any:
    """Returns a dataset with `CountedPerReplica` values, which have rows of zeros for replicas without data.

    Call this for a dataset for which `has_static_sizes` is true, and `patch_distributed_iterators` before the result is
    iterated.
    """
    filled = copy.copy(dataset)
    filled._element_spec = tf.nest.map_structure(
        lambda spec: _counted_spec(spec, None, is_filled=True), dataset._element_spec
    )
    return filled


def carry_counts(dataset: Any, counted: Any) -> Any:
    """Returns a dataset of which one part of the batches carries its numbers of samples, as `CountedPerReplica`.

    Args:
        dataset: A dataset whose batches may have any size.
        counted: The `tf.TypeSpec` of that part, one of the dataset's, for which `can_count` is true.
    """
    carrier = copy.copy(dataset)
    specs = tf.nest.flatten(dataset._element_spec)
    position = next(index for index, spec in enumerate(specs) if spec is counted)
    specs[position] = _counted_spec(counted, None)
    carrier._element_spec = tf.nest.pack_sequence_as(dataset._element_spec, specs)
    return carrier


def batch_spec(dataset: Any) -> Any:
    """Returns the structure of `tf.TypeSpec`s of a dataset's batches, with static sizes that `keep_static_sizes` keeps.

    >>> batch_spec(tf.data.Dataset.range(9).batch(3, drop_remainder=True))
    TensorSpec(shape=(3,), dtype=tf.int64, name=None)
    """
    counted = _counted(getattr(dataset, "_element_spec", None))
    return dataset._element_spec if counted is not None and counted.has_static_rows else dataset.element_spec


def replica_spec(dataset: Any) -> Any:
    """Returns the structure of `tf.TensorSpec`s of a replica's batches if `has_static_sizes` is true."""
    return tf.nest.map_structure(lambda spec: spec._value_specs[0], dataset._element_spec)


def tensorflow_spec(element_spec: Any) -> Any:
    """Returns the `_element_spec` of a distributed dataset as TensorFlow has created it."""

    def stock(spec: Any) -> Any:
        return _PerReplicaSpec(*spec._value_specs) if isinstance(spec, _PerReplicaSpec) else spec

    return tf.nest.map_structure(stock, element_spec)


def filled_samples(data: Any) -> tuple[tf.Tensor, ...] | None:
    """Returns the local replicas' numbers of samples in a batch of `keep_static_sizes`; `None` for others."""
    leaves = tf.nest.flatten(data)
    return next((leaf.samples for leaf in leaves if isinstance(leaf, CountedPerReplica) and leaf.is_filled), None)


def without_filled_rows(data: Any) -> Any:
    """Returns TensorFlow's values for each batch of `keep_static_sizes`: a replica without data has no rows."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, CountedPerReplica) or not leaf.is_filled:
            return leaf
        return _PerReplica([rows[:count] for rows, count in zip(leaf.values, leaf.samples, strict=True)])

    return tf.nest.map_structure(cut, data)


@patch
def patch_distributed_iterators() -> None:
    """Makes TensorFlow's distributed iterators draw `CountedPerReplica` values. More calls have no effect."""
    replace(_Iterator, "get_next")(_or_counted(_Iterator.get_next, _get_next))
    replace(_Iterator, "get_next_as_optional")(_or_counted(_Iterator.get_next_as_optional, _get_next_as_optional))


_ends_are_known: Callable[[Any], Any] = lambda strategy: None  # noqa: E731


@patch
def patch_agreement_on_end(ends_are_known: Callable[[Any], Any]) -> None:
    """Lets workers draw batches without asking each other whether the data has ended.

    Args:
        ends_are_known: Takes a strategy, returns a bool variable: whether the caller makes as many steps on all
            workers as the one with most data has batches, and needs no totals. `None`: workers always ask.
    """
    global _ends_are_known
    _ends_are_known, stock = ends_are_known, _input_lib._calculate_replicas_with_values

    @replace(_input_lib, "_calculate_replicas_with_values")
    def replicas_with_values(strategy: Any, input_workers: Any, optionals: Any) -> tf.Tensor:
        return _unless_known(strategy, [1], lambda: stock(strategy, input_workers, optionals))


def draw_optionals(iterator: Any) -> tuple[list[Any], tf.Tensor]:
    """Returns the optional batches of the local replicas, and how many replicas of all workers have one.

    If ends are known, that is 1 or 0.
    """
    workers = iterator._input_workers
    with tf.device(workers.worker_devices[0]):
        optionals = iterator._iterators[0].get_next_as_optional_list()
    if not iterator._enable_get_next_as_optional:
        return optionals, tf.cast(optionals[0].has_value(), tf.int64)
    return optionals, _input_lib._calculate_replicas_with_values(iterator._strategy, workers, [optionals])


def _unless_known(strategy: Any, if_known: Any, ask: Callable[[], tf.Tensor]) -> tf.Tensor:
    are_known = _ends_are_known(strategy)
    if are_known is None:
        return ask()
    return tf.cond(are_known, lambda: tf.convert_to_tensor(if_known, tf.int64), ask)


def _or_counted(stock: Callable[..., Any], draw: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def draw_counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = _counted(getattr(self, "_element_spec", None))
        return stock(self, *args, **kwargs) if spec is None else draw(self, spec)

    return draw_counted


def _get_next(iterator: Any, spec: CountedPerReplicaSpec) -> Any:
    def at_end() -> Any:
        values = iterator._get_next_no_partial_batch_handling()
        return _with_counts(iterator, values, None if spec.total is not None else [True] * len(spec._value_specs), 0)

    if spec.total is not None:
        return at_end()
    any_has_value, batch = _draw(iterator, spec)
    return tf.cond(any_has_value, batch, at_end)


def _get_next_as_optional(iterator: Any, spec: CountedPerReplicaSpec) -> Any:
    any_has_value, batch = _draw(iterator, spec)
    return tf.cond(
        any_has_value,
        lambda: tf.experimental.Optional.from_value(batch()),
        lambda: tf.experimental.Optional.empty(iterator._element_spec),
    )


def _draw(iterator: Any, spec: CountedPerReplicaSpec) -> tuple[tf.Tensor, Callable[[], Any]]:
    """Returns whether any replica of all workers has data, and a function that returns the batch if so."""
    if spec.has_static_rows:
        optionals, replicas = draw_optionals(iterator)
        return replicas > 0, lambda: _static_batch(iterator, spec, optionals, replicas)
    workers, strategy = iterator._input_workers, iterator._strategy
    with tf.device(workers.worker_devices[0]):
        optionals = iterator._iterators[0].get_next_as_optional_list()
    values = _values_or_none(workers, [optionals], produce_dummy=True)
    position = next(i for i, one in enumerate(tf.nest.flatten(iterator._element_spec)) if one is spec)
    rows = []
    for value, device in zip(values, workers.compute_devices_for_worker(0), strict=True):
        with tf.device(device):
            rows.append(tf.shape(tf.nest.flatten(value)[position], out_type=tf.int64)[0])
    with tf.device(workers.worker_devices[0]):
        has_value = tf.add_n([tf.cast(optional.has_value(), tf.int64) for optional in optionals])
        own = tf.stack([has_value, tf.add_n(rows)])
    agreed = own
    if strategy.extended._in_multi_worker_mode():
        # Under local updates nobody asks for the total.
        agreed = _unless_known(strategy, [1, 0], lambda: strategy.reduce(tf.distribute.ReduceOp.SUM, own, axis=None))
    batch = regroup(tuple(values), always_wrap=True)
    return agreed[0] > 0, lambda: _with_counts(iterator, batch, rows, agreed[1])


def _static_batch(iterator: Any, spec: CountedPerReplicaSpec, optionals: list[Any], replicas: tf.Tensor) -> Any:
    batches = []
    for optional, device in zip(optionals, iterator._input_workers.compute_devices_for_worker(0), strict=True):
        with tf.device(device):
            value = optional.get_value
            zeros = functools.partial(_zeros, optional)
            batches.append(tf.cond(optional.has_value(), value, zeros) if spec.is_filled else value())
    has_value = [optional.has_value() for optional in optionals] if spec.is_filled else None
    return _with_counts(iterator, regroup(tuple(batches), always_wrap=True), has_value, replicas)


def _zeros(optional: Any) -> Any:
    # Along a dimension of an unknown size there is one element: with none, means are NaN.
    return tf.nest.map_structure(
        lambda spec: tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype), optional.element_spec
    )


def _with_counts(iterator: Any, batch: Any, own: list[Any] | None, others: Any) -> Any:
    """Returns a distributed batch with its counts.

    Args:
        iterator: Which draws it.
        batch: TensorFlow's values.
        own: The samples of each local replica; where sizes are static, whether it has data. `None` if numbers are known
            while tracing.
        others: The samples of all replicas of all workers, or the number of replicas that have data.
    """

    def counted(value: Any, spec: Any) -> Any:
        if not isinstance(spec, CountedPerReplicaSpec):
            return value
        if own is None:
            return CountedPerReplica(value.values, spec, None)
        with tf.device(iterator._input_workers.worker_devices[0]):
            counts = tf.stack([*(tf.cast(one, tf.int64) for one in own), tf.cast(others, tf.int64)])
            if spec.is_filled:
                counts *= _rows(spec._value_specs[0])
        return CountedPerReplica(value.values, spec, counts)

    return tf.nest.map_structure(counted, batch, iterator._element_spec)


def _counted_spec(spec: Any, total: int | None, *, is_filled: bool = False) -> CountedPerReplicaSpec:
    return CountedPerReplicaSpec(
        tuple(tf.TensorSpec(part.shape, part.dtype) for part in spec._value_specs), total, is_filled
    )


def _counted(element_spec: Any) -> CountedPerReplicaSpec | None:
    return next((spec for spec in tf.nest.flatten(element_spec) if isinstance(spec, CountedPerReplicaSpec)), None)


def _rows(value: Any) -> int | None:
    shape: Any = getattr(value, "shape", None)
    return shape[0] if getattr(shape, "rank", None) else None
