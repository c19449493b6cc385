"""Distributed batches that keep their static size, although workers may reach the end of their data at different steps.

A worker without data must take part in the steps of the others. TensorFlow gives its replicas a batch without rows, so
no batch of several workers has a static size. Here they get rows of zeros, as many as the others have, with the number
of samples among them: 0. That number is a part of the distributed value, so it passes through functions and loops, and
a batch with it is of another type than one of TensorFlow: a function is traced for each of the two.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.tensorflow_symbols import regroup

_INPUT = "tensorflow.python.distribute.input_lib"

_PerReplica = private("tensorflow.python.distribute.values:PerReplica", "holds the parts of a batch")
_PerReplicaSpec = private("tensorflow.python.distribute.values:PerReplicaSpec", "the type of such a value")
_Iterator = private(f"{_INPUT}:DistributedIteratorBase", "draws the batches of the replicas")
_replicas_with_values = private(
    f"{_INPUT}:_calculate_replicas_with_values", "lets all workers agree whether the data has ended"
)
_input_lib = private("tensorflow.python.distribute:input_lib", "likewise, as its iterators call it")
private(
    f"{_INPUT}:DistributedIteratorBase._get_next_no_partial_batch_handling", "raises the error at the end of the data"
)


class FilledPerReplica(_PerReplica):  # type: ignore[misc, valid-type]
    """A tensor of each local replica, and how many of its rows are samples: all, or none of them.

    Attributes:
        samples: The numbers of samples, an int32 scalar of each local replica.
    """

    def __init__(self, values: Sequence[tf.Tensor], samples: Sequence[tf.Tensor]) -> None:
        super().__init__(values)
        self.samples = tuple(samples)

    @property
    def _type_spec(self) -> Any:
        return FilledPerReplicaSpec(*(tf.TensorSpec(part.shape, part.dtype) for part in (*self._values, *self.samples)))


class FilledPerReplicaSpec(_PerReplicaSpec):  # type: ignore[misc, valid-type]
    """The type of a `FilledPerReplica`: the `tf.TensorSpec`s of its values, then those of its numbers of samples."""

    value_type = property(lambda self: FilledPerReplica)

    def __init__(self, *specs: tf.TensorSpec) -> None:
        super().__init__(*specs[: len(specs) // 2])
        self._all_specs = specs

    def _serialize(self) -> Any:
        return self._all_specs

    @property
    def _component_specs(self) -> Any:
        return self._all_specs

    def _to_components(self, value: Any) -> Any:
        return (*super()._to_components(value), *value.samples)

    def _from_components(self, components: Any) -> Any:
        half = len(components) // 2
        return FilledPerReplica(components[:half], components[half:])


def may_be_filled(dataset: Any) -> bool:
    """Whether a distributed dataset has batches of a static size that TensorFlow would make dynamic."""
    if not getattr(dataset, "_enable_get_next_as_optional", False):
        return False
    if not dataset._strategy.extended._in_multi_worker_mode() or len(dataset._input_workers.worker_devices) != 1:
        return False
    return all(map(_has_static_rows, tf.nest.flatten(dataset._element_spec)))


def keep_static_sizes(dataset: Any) -> Any:
    """Returns a distributed dataset for which `may_be_filled` is true with `FilledPerReplica` values as its batches.

    It shares the state of `dataset`, which does not change. Call `patch_distributed_iterators` before it is iterated.
    """
    filled = copy.copy(dataset)
    filled._element_spec = tf.nest.map_structure(_filled_spec, dataset._element_spec)
    return filled


def batch_spec(dataset: Any) -> Any:
    """Returns the structure of `tf.TypeSpec`s of a dataset's batches, with the sizes that `keep_static_sizes` has kept.

    >>> batch_spec(tf.data.Dataset.range(9).batch(3, drop_remainder=True))
    TensorSpec(shape=(3,), dtype=tf.int64, name=None)
    """
    return dataset._element_spec if _is_filled(getattr(dataset, "_element_spec", None)) else dataset.element_spec


def replica_spec(dataset: Any) -> Any:
    """Returns the structure of `tf.TensorSpec`s of a replica's batches if `may_be_filled` is true."""
    return tf.nest.map_structure(lambda spec: spec._value_specs[0], dataset._element_spec)


def tensorflow_spec(element_spec: Any) -> Any:
    """Returns the `_element_spec` of a distributed dataset as TensorFlow has created it."""

    def stock(spec: Any) -> Any:
        return _PerReplicaSpec(*spec._value_specs) if isinstance(spec, _PerReplicaSpec) else spec

    return tf.nest.map_structure(stock, element_spec)


def samples_of_replicas(data: Any) -> tuple[tf.Tensor, ...] | None:
    """Returns the local replicas' numbers of samples in a batch of `FilledPerReplica` values; `None` for others."""
    return next((leaf.samples for leaf in tf.nest.flatten(data) if isinstance(leaf, FilledPerReplica)), None)


def without_filled_rows(data: Any) -> Any:
    """Returns TensorFlow's values for each `FilledPerReplica`: a replica without data has no rows."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, FilledPerReplica):
            return leaf
        return _PerReplica([rows[:count] for rows, count in zip(leaf.values, leaf.samples, strict=True)])

    return tf.nest.map_structure(cut, data)


def patch_distributed_iterators() -> None:
    """Makes TensorFlow's distributed iterators draw the batches of `keep_static_sizes`. More calls have no effect."""
    if not hasattr(_Iterator.get_next, "draws_filled"):
        _Iterator.get_next = _or_filled(_Iterator.get_next, _get_next)
        _Iterator.get_next_as_optional = _or_filled(_Iterator.get_next_as_optional, _get_next_as_optional)


def patch_agreement_on_end(ends_are_known: Callable[[Any], Any]) -> None:
    """Lets workers draw batches without asking each other whether the data has ended; call this once.

    Args:
        ends_are_known: Takes a strategy, returns a bool variable: whether the caller makes as many steps on all
            workers as the one with most data has batches. `None`: workers always ask.
    """
    global _replicas_with_values
    stock = _replicas_with_values

    @functools.wraps(stock)
    def replicas_with_values(strategy: Any, input_workers: Any, optionals: Any) -> tf.Tensor:
        are_known = ends_are_known(strategy)
        if are_known is None:
            return stock(strategy, input_workers, optionals)
        one = tf.constant(1, tf.int64)
        return tf.cond(are_known, lambda: one, lambda: stock(strategy, input_workers, optionals))

    _replicas_with_values = _input_lib._calculate_replicas_with_values = replicas_with_values


def _or_filled(stock: Callable[..., Any], draw: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def draw_filled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return draw(self) if _is_filled(getattr(self, "_element_spec", None)) else stock(self, *args, **kwargs)

    draw_filled.draws_filled = True  # type: ignore[attr-defined]
    return draw_filled


def _get_next(iterator: Any) -> Any:
    optionals, any_has_value = draw_optionals(iterator)

    def end() -> Any:
        return _filled(iterator, iterator._get_next_no_partial_batch_handling(), None)

    return tf.cond(any_has_value, lambda: _values_or_zeros(iterator, optionals), end)


def _get_next_as_optional(iterator: Any) -> Any:
    optionals, any_has_value = draw_optionals(iterator)
    return tf.cond(
        any_has_value,
        lambda: tf.experimental.Optional.from_value(_values_or_zeros(iterator, optionals)),
        lambda: tf.experimental.Optional.empty(iterator._element_spec),
    )


def draw_optionals(iterator: Any) -> tuple[list[Any], tf.Tensor]:
    """Returns the optional batches of the local replicas, and whether any replica of all workers has one."""
    workers = iterator._input_workers
    with tf.device(workers.worker_devices[0]):
        optionals = iterator._iterators[0].get_next_as_optional_list()
    return optionals, _replicas_with_values(iterator._strategy, workers, [optionals]) > 0


def _values_or_zeros(iterator: Any, optionals: list[Any]) -> Any:
    devices = iterator._input_workers.compute_devices_for_worker(0)
    batches = []
    for optional, device in zip(optionals, devices, strict=True):
        with tf.device(device):
            batches.append(tf.cond(optional.has_value(), optional.get_value, functools.partial(_zeros, optional)))
    values = regroup(tuple(batches), always_wrap=True)
    return _filled(iterator, values, [optional.has_value() for optional in optionals])


def _zeros(optional: Any) -> Any:
    # Along a dimension of an unknown size there is one element: with none, means are NaN.
    return tf.nest.map_structure(
        lambda spec: tf.zeros([1 if size is None else size for size in spec.shape], spec.dtype), optional.element_spec
    )


def _filled(iterator: Any, batch: Any, has_value: list[Any] | None) -> Any:
    """Returns a distributed batch with the numbers of samples; `has_value` is `None` if all replicas have data."""

    def filled(value: Any, spec: Any) -> Any:
        rows = spec._value_specs[0].shape[0]
        has = [True] * len(value.values) if has_value is None else has_value
        with tf.device(iterator._input_workers.worker_devices[0]):
            return FilledPerReplica(value.values, [tf.where(has_rows, rows, 0) for has_rows in has])

    return tf.nest.map_structure(filled, batch, iterator._element_spec)


def _has_static_rows(spec: Any) -> bool:
    parts = getattr(spec, "_value_specs", ())
    return bool(parts) and all(
        isinstance(part, tf.TensorSpec) and part.shape.rank is not None and part.shape.rank > 0 and bool(part.shape[0])
        for part in parts
    )


def _filled_spec(spec: Any) -> FilledPerReplicaSpec:
    parts = [tf.TensorSpec(part.shape, part.dtype) for part in spec._value_specs]
    return FilledPerReplicaSpec(*parts, *[tf.TensorSpec([], tf.int32) for _ in parts])


def _is_filled(element_spec: Any) -> bool:
    return any(isinstance(spec, FilledPerReplicaSpec) for spec in tf.nest.flatten(element_spec))
