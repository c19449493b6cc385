"""The distributed value of a batch: the rows of each local replica, and what is known of them.

Batches are of four kinds:

- complete: each replica holds all rows of the global batch. Which of them it computes is decided when the step runs, so
  a change needs no other pipeline, and nothing that was read ahead is lost.
- of static numbers: the workers have agreed that their batches have one static size and end together. How many rows of
  all workers are samples is known while tracing, and nothing is asked.
- counted: one exchange, when a batch is drawn, tells how many rows of all workers are samples, and whether any worker
  has data, which TensorFlow asks for each batch otherwise. A worker without data must take part in the steps of the
  others, so TensorFlow gives its replicas a batch without rows.
- filled: counted batches of a static size. Replicas without data have as many rows as the others: zeros, which are not
  samples.

The kind and the numbers are parts of the value and its type, so they pass through functions and loops. Such a batch is
of another type than one of TensorFlow, and whatever a user computes from it is not: a function is traced for each of
them.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import hooks_of
from tfdist.tensorflow_internals.tensorflow_symbols import regroup

_INPUT = "tensorflow.python.distribute.input_lib"

_PerReplica = private("tensorflow.python.distribute.values:PerReplica", "holds the parts of a batch")
_PerReplicaSpec = private("tensorflow.python.distribute.values:PerReplicaSpec", "the type of such a value")
_Iterator = private(f"{_INPUT}:DistributedIteratorBase", "draws the batches of the replicas")
_values_or_none = private(f"{_INPUT}:_get_value_or_dummy", "gives a replica without data a batch without rows")
_input_lib = private("tensorflow.python.distribute:input_lib", "likewise, as its iterators call it")
_DRAW = "_tfdist_draw"  # an attribute of iterators


class RowsPerReplica(_PerReplica):  # type: ignore[misc, valid-type]
    """A tensor of each local replica, and what is known of its rows.

    Attributes:
        is_complete: Whether each replica has all rows of the global batch; then none of the numbers is known.
        is_filled: Whether replicas without data have rows of zeros instead of no rows.
        total: The number of samples of all replicas of all workers, an int if it is known while tracing, else an int64
            scalar.
        samples: The numbers of samples of the local replicas, likewise.
    """

    def __init__(
        self, values: Sequence[tf.Tensor], spec: "RowsPerReplicaSpec", counts: tf.Tensor | None = None
    ) -> None:
        super().__init__(values)
        self._counts, self._total = counts, spec.total
        self.is_complete, self.is_filled = spec.is_complete, spec.is_filled

    @property
    def total(self) -> int | tf.Tensor:
        return self._total if self._counts is None else self._counts[-1]

    @property
    def samples(self) -> tuple[int | tf.Tensor, ...]:
        if self._counts is None:
            return tuple(value.shape[0] for value in self.values)
        return tuple(self._counts[replica] for replica in range(len(self.values)))

    @property
    def _type_spec(self) -> Any:
        if self.is_complete:  # also ragged and sparse tensors
            return RowsPerReplicaSpec(super()._type_spec._value_specs, is_complete=True)
        specs = tuple(tf.TensorSpec(value.shape, value.dtype) for value in self._values)
        return RowsPerReplicaSpec(specs, self._total, self.is_filled)


class RowsPerReplicaSpec(_PerReplicaSpec):  # type: ignore[misc, valid-type]
    """The type of a `RowsPerReplica`.

    Args:
        value_specs: The `tf.TypeSpec`s of its values.
        total: Its number of samples if all rows of all workers are samples; `None` if it is known in the graph only.
        is_filled: See `RowsPerReplica`.
        is_complete: Likewise.
    """

    value_type = property(lambda self: RowsPerReplica)

    def __init__(
        self,
        value_specs: Sequence[tf.TypeSpec],
        total: int | None = None,
        is_filled: bool = False,
        is_complete: bool = False,
    ) -> None:
        super().__init__(*value_specs)
        self.total, self.is_filled, self.is_complete = total, is_filled, is_complete

    @property
    def has_static_rows(self) -> bool:
        """Whether the replicas have a static number of rows, also without data."""
        return self.total is not None or self.is_filled

    @property
    def _has_counts(self) -> bool:
        return self.total is None and not self.is_complete

    def _serialize(self) -> Any:
        return self._value_specs, self.total, self.is_filled, self.is_complete

    @property
    def _component_specs(self) -> Any:
        counts = [tf.TensorSpec([len(self._value_specs) + 1], tf.int64)]
        return (*self._value_specs, *(counts if self._has_counts else ()))

    def _to_components(self, value: Any) -> Any:
        return (*super()._to_components(value), *(() if value._counts is None else (value._counts,)))

    def _from_components(self, components: Any) -> Any:
        values = components[: len(self._value_specs)]
        if self.is_complete:
            return RowsPerReplica(values, self)
        # The components may be what `tf.nest.map_structure(..., expand_composites=True)` has made of them.
        for value, spec in zip(values, self._value_specs, strict=True):
            if _rows(value) != _rows(spec) and (self.total is not None or None not in (_rows(value), _rows(spec))):
                return _PerReplica(values)
        return RowsPerReplica(values, self, components[-1] if self._has_counts else None)


def is_complete(data: Any) -> bool:
    """Whether `data` is a batch, or has one in its structure, of a dataset that `mark_complete` returned."""
    return any(isinstance(leaf, RowsPerReplica) and leaf.is_complete for leaf in tf.nest.flatten(data))


def parts_of_complete(data: Any, part_of: Callable[[Any, int], Any]) -> Any:
    """Returns `data` with the values of the replicas in place of complete batches.

    `part_of` takes such a structure, with tensors in their place, and the index of a local replica; it returns its
    part.
    """
    leaves = tf.nest.flatten(data)
    positions = [position for position, leaf in enumerate(leaves) if is_complete(leaf)]
    replicas = len(leaves[positions[0]].values)
    parts = [part_of([leaves[position].values[index] for position in positions], index) for index in range(replicas)]
    for number, position in enumerate(positions):
        leaves[position] = _PerReplica([part[number] for part in parts])
    return tf.nest.pack_sequence_as(data, leaves)


def filled_samples(data: Any) -> tuple[tf.Tensor, ...] | None:
    """Returns the local replicas' numbers of samples in a batch of `keep_static_sizes`; `None` for others."""
    leaves = tf.nest.flatten(data)
    return next((leaf.samples for leaf in leaves if isinstance(leaf, RowsPerReplica) and leaf.is_filled), None)


def without_filled_rows(data: Any) -> Any:
    """Returns TensorFlow's values for each batch of `keep_static_sizes`: a replica without data has no rows."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, RowsPerReplica) or not leaf.is_filled:
            return leaf
        return _PerReplica([rows[:count] for rows, count in zip(leaf.values, leaf.samples, strict=True)])

    return tf.nest.map_structure(cut, data)


def can_count(spec: Any) -> bool:
    """Whether the values of a `tf.TypeSpec` of a distributed dataset have rows that can be counted."""
    parts = getattr(spec, "_value_specs", ())
    return bool(parts) and all(isinstance(part, tf.TensorSpec) and bool(part.shape.rank) for part in parts)


def has_known_rows(element_spec: Any) -> bool:
    """Whether all sizes of the batches of a distributed dataset are known, but perhaps the number of their rows."""
    specs = tf.nest.flatten(element_spec)
    parts = [part for spec in specs for part in getattr(spec, "_value_specs", ())]
    return all(map(can_count, specs)) and all(part.shape[1:].is_fully_defined() for part in parts)


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

    It shares the state of `dataset`, which does not change, like the results of the next four functions.
    """
    knowing = copy.copy(dataset)
    knowing._enable_get_next_as_optional = False
    return knowing


def mark_complete(dataset: Any) -> Any:
    """Returns a dataset, whose replicas draw complete batches, with `RowsPerReplica` values that say so."""
    return _with_specs(dataset, lambda spec: RowsPerReplicaSpec(spec._value_specs, is_complete=True))


def carry_static_counts(dataset: Any, replicas: int) -> Any:
    """Returns a dataset with `RowsPerReplica` values of a static size: `replicas` of all workers have as many rows.

    Call this for a dataset for which `has_static_sizes` is true, and `know_ends` is right.
    """
    return _with_specs(
        know_ends(dataset), lambda spec: _counted_spec(spec, replicas * int(spec._value_specs[0].shape[0]))
    )


def keep_static_sizes(dataset: Any) -> Any:
    """Returns a dataset with `RowsPerReplica` values, which have rows of zeros for replicas without data.

    Call this for a dataset for which `has_static_sizes` is true.
    """
    return _with_specs(dataset, lambda spec: _counted_spec(spec, None, is_filled=True))


def carry_counts(dataset: Any, counted: Any) -> Any:
    """Returns a dataset of which one part of the batches carries its numbers of samples, as `RowsPerReplica`.

    `counted` is the `tf.TypeSpec` of that part, for which `can_count` is true. Batches may have any size.
    """
    return _with_specs(dataset, lambda spec: _counted_spec(spec, None) if spec is counted else spec)


def batch_spec(dataset: Any) -> Any:
    """Returns the structure of `tf.TypeSpec`s of a dataset's batches, with static sizes that `keep_static_sizes` keeps.

    >>> batch_spec(tf.data.Dataset.range(9).batch(3, drop_remainder=True))
    TensorSpec(shape=(3,), dtype=tf.int64, name=None)
    """
    spec = _spec_of_rows(getattr(dataset, "_element_spec", None))
    return dataset._element_spec if spec is not None and spec.has_static_rows else dataset.element_spec


def replica_spec(dataset: Any) -> Any:
    """Returns the structure of `tf.TensorSpec`s of a replica's batches if `has_static_sizes` is true."""
    return tf.nest.map_structure(lambda spec: spec._value_specs[0], dataset._element_spec)


def tensorflow_spec(element_spec: Any) -> Any:
    """Returns the `_element_spec` of a distributed dataset as TensorFlow has created it."""

    def stock(spec: Any) -> Any:
        return _PerReplicaSpec(*spec._value_specs) if isinstance(spec, _PerReplicaSpec) else spec

    return tf.nest.map_structure(stock, element_spec)


@patch
def patch_distributed_iterators() -> None:
    """Makes TensorFlow's distributed iterators draw `RowsPerReplica` values, and ask for the end only if needed."""
    stock = _input_lib._calculate_replicas_with_values
    replace(_Iterator, "get_next")(_or_rows(_Iterator.get_next, _get_next))
    replace(_Iterator, "get_next_as_optional")(_or_rows(_Iterator.get_next_as_optional, _get_next_as_optional))

    @replace(_input_lib, "_calculate_replicas_with_values")
    def replicas_with_values(strategy: Any, input_workers: Any, optionals: Any) -> tf.Tensor:
        return _unless_known(strategy, [1], lambda: stock(strategy, input_workers, optionals))


def _unless_known(strategy: Any, if_known: Any, ask: Callable[[], tf.Tensor]) -> tf.Tensor:
    are_known = hooks_of(strategy).ends_are_known(strategy)
    if are_known is None:
        return ask()
    return tf.cond(are_known, lambda: tf.convert_to_tensor(if_known, tf.int64), ask)


def _or_rows(stock: Callable[..., Any], draw: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def draw_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = _spec_of_rows(getattr(self, "_element_spec", None))
        return stock(self, *args, **kwargs) if spec is None else draw(self, spec)

    return draw_rows


def _get_next(iterator: Any, spec: RowsPerReplicaSpec) -> Any:
    if spec.is_complete and not iterator._enable_get_next_as_optional and tf.executing_eagerly():
        if not hasattr(iterator, _DRAW):
            setattr(iterator, _DRAW, _eager_draw(iterator))
        if (draw := getattr(iterator, _DRAW)) is not None:
            return draw()

    def without_counts() -> Any:
        values = iterator._get_next_no_partial_batch_handling()
        return _with_counts(iterator, values, [True] * len(spec._value_specs) if spec._has_counts else None, 0)

    # Of complete batches the workers must agree on the end, unless they know that they end together.
    if not spec._has_counts and not (spec.is_complete and iterator._enable_get_next_as_optional):
        return without_counts()
    any_has_value, batch = _draw(iterator, spec)
    return tf.cond(any_has_value, batch, without_counts)


def _eager_draw(iterator: Any) -> Callable[[], Any] | None:
    """Returns what draws a complete batch of tensors outside of a function, where TensorFlow's iterators take 0.6 ms.

    `None` if a part of the batches is no tensor, as a ragged one, or the replicas have one iterator.
    """
    structure, devices = iterator._element_spec, iterator._input_workers.compute_devices_for_worker(0)
    specs = tf.nest.flatten(structure)
    # Behind that of the iterator over several devices, if there is one.
    handles = tf.nest.flatten(iterator, expand_composites=True)[-len(devices) :]
    parts: list[Any] = [spec._value_specs[0] if isinstance(spec, RowsPerReplicaSpec) else None for spec in specs]
    if len(handles) != len(devices) or not all(isinstance(part, tf.TensorSpec) for part in parts):
        return None
    types, shapes = [part.dtype for part in parts], [part.shape for part in parts]

    def draw() -> Any:
        drawn = []
        for device, handle in zip(devices, handles, strict=True):
            with tf.device(device):
                drawn.append(tf.raw_ops.IteratorGetNext(iterator=handle, output_types=types, output_shapes=shapes))
        leaves = [RowsPerReplica(values, spec) for spec, *values in zip(specs, *drawn, strict=True)]
        return tf.nest.pack_sequence_as(structure, leaves)

    return draw


def _get_next_as_optional(iterator: Any, spec: RowsPerReplicaSpec) -> Any:
    any_has_value, batch = _draw(iterator, spec)
    return tf.cond(
        any_has_value,
        lambda: tf.experimental.Optional.from_value(batch()),
        lambda: tf.experimental.Optional.empty(iterator._element_spec),
    )


def _draw(iterator: Any, spec: RowsPerReplicaSpec) -> tuple[tf.Tensor, Callable[[], Any]]:
    """Returns whether any replica of all workers has data, and a function that returns the batch if so."""
    if spec.is_complete or spec.has_static_rows:
        optionals, replicas = _draw_optionals(iterator)
        return replicas > 0, lambda: _batch_of(iterator, spec, optionals, replicas)
    workers, strategy = iterator._input_workers, iterator._strategy
    with tf.device(workers.worker_devices[0]):
        optionals = iterator._iterators[0].get_next_as_optional_list()
    values = _values_or_none(workers, [optionals], produce_dummy=True)
    specs = tf.nest.flatten(iterator._element_spec)
    position = next(index for index, spec_of_leaf in enumerate(specs) if spec_of_leaf is spec)
    rows = []
    for value, device in zip(values, workers.compute_devices_for_worker(0), strict=True):
        with tf.device(device):
            rows.append(tf.shape(tf.nest.flatten(value)[position], out_type=tf.int64)[0])
    with tf.device(workers.worker_devices[0]):
        has_value = tf.add_n([tf.cast(optional.has_value(), tf.int64) for optional in optionals])
        of_worker = tf.stack([has_value, tf.add_n(rows)])
    of_all = of_worker
    if strategy.extended._in_multi_worker_mode():
        # Under local updates nobody asks for the total.
        of_all = _unless_known(
            strategy, [1, 0], lambda: strategy.reduce(tf.distribute.ReduceOp.SUM, of_worker, axis=None)
        )
    batch = regroup(tuple(values), always_wrap=True)
    return of_all[0] > 0, lambda: _with_counts(iterator, batch, rows, of_all[1])


def _draw_optionals(iterator: Any) -> tuple[list[Any], tf.Tensor]:
    """Returns the optional batches of the local replicas, and how many replicas of all workers have one.

    If ends are known, that is 1 or 0.
    """
    workers = iterator._input_workers
    with tf.device(workers.worker_devices[0]):
        optionals = iterator._iterators[0].get_next_as_optional_list()
    if not iterator._enable_get_next_as_optional:
        return optionals, tf.cast(optionals[0].has_value(), tf.int64)
    return optionals, _input_lib._calculate_replicas_with_values(iterator._strategy, workers, [optionals])


def _batch_of(iterator: Any, spec: RowsPerReplicaSpec, optionals: list[Any], replicas: tf.Tensor) -> Any:
    batches = []
    for optional, device in zip(optionals, iterator._input_workers.compute_devices_for_worker(0), strict=True):
        with tf.device(device):
            batches.append(_value_of(optional, spec))
    has_value = [optional.has_value() for optional in optionals] if spec.is_filled else None
    return _with_counts(iterator, regroup(tuple(batches), always_wrap=True), has_value, replicas)


def _value_of(optional: Any, spec: RowsPerReplicaSpec) -> Any:
    """Returns a local replica's batch, of which some replica has data."""
    if spec.is_filled:
        return tf.cond(optional.has_value(), optional.get_value, functools.partial(_zeros, optional))
    if not spec.is_complete:
        return optional.get_value()
    check = tf.debugging.Assert(
        optional.has_value(),
        [
            "The data of this worker has ended and that of another one has not. Expected: all workers draw the "
            "same batches, of which each computes its rows. Received: fewer batches. Give all workers the same "
            "data, or create the strategy without `load_balancing` and `shares`."
        ],
    )
    with tf.control_dependencies([] if check is None else [check]):
        return optional.get_value()


def _zeros(optional: Any) -> Any:
    # Along a dimension of an unknown size there is one element: with none, means are NaN.
    return tf.nest.map_structure(
        lambda spec: tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype), optional.element_spec
    )


def _with_counts(iterator: Any, batch: Any, local: list[Any] | None, everyone: Any) -> Any:
    """Returns a distributed batch with its counts.

    `local` are the samples of each local replica; where sizes are static, whether it has data; `None` if numbers are
    known while tracing, or not at all. `everyone` are the samples of all replicas of all workers, or the number of
    replicas that have data.
    """

    def rows_of(value: Any, spec: Any) -> Any:
        if not isinstance(spec, RowsPerReplicaSpec):
            return value
        if local is None:
            return RowsPerReplica(value.values, spec)
        with tf.device(iterator._input_workers.worker_devices[0]):
            counts = tf.stack([*(tf.cast(count, tf.int64) for count in local), tf.cast(everyone, tf.int64)])
            if spec.is_filled:
                counts *= _rows(spec._value_specs[0])
        return RowsPerReplica(value.values, spec, counts)

    return tf.nest.map_structure(rows_of, batch, iterator._element_spec)


def _with_specs(dataset: Any, spec_of: Callable[[Any], Any]) -> Any:
    """Returns a distributed dataset with what `spec_of` returns for the `tf.TypeSpec`s of its batches."""
    changed = copy.copy(dataset)
    changed._element_spec = tf.nest.map_structure(spec_of, dataset._element_spec)
    return changed


def _counted_spec(spec: Any, total: int | None, *, is_filled: bool = False) -> RowsPerReplicaSpec:
    return RowsPerReplicaSpec(
        tuple(tf.TensorSpec(part.shape, part.dtype) for part in spec._value_specs), total, is_filled
    )


def _spec_of_rows(element_spec: Any) -> RowsPerReplicaSpec | None:
    return next((spec for spec in tf.nest.flatten(element_spec) if isinstance(spec, RowsPerReplicaSpec)), None)


def _rows(value: Any) -> int | None:
    shape: Any = getattr(value, "shape", None)
    return shape[0] if getattr(shape, "rank", None) else None
