"""Distributed batches of which each local replica holds all rows of the global batch.

Which rows a replica computes is decided when the step runs, so a change needs no other pipeline, and nothing that was
read ahead is lost. The mark is the type of the distributed value, so it passes through functions and loops.
"""

import copy
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.tensorflow_internals.counted_batches import draw_optionals
from tfdist.tensorflow_internals.input_pipeline import pipeline_nodes
from tfdist.tensorflow_internals.tensorflow_symbols import regroup

_PerReplica = private("tensorflow.python.distribute.values:PerReplica", "holds the parts of a batch")
_PerReplicaSpec = private("tensorflow.python.distribute.values:PerReplicaSpec", "the type of such a value")
_Iterator = private(
    "tensorflow.python.distribute.input_lib:DistributedIteratorBase", "draws the batches of the replicas"
)


class CompletePerReplica(_PerReplica):  # type: ignore[misc, valid-type]
    """A tensor of each local replica, which holds all rows of the global batch."""

    @property
    def _type_spec(self) -> Any:
        return CompletePerReplicaSpec(*super()._type_spec._value_specs)


class CompletePerReplicaSpec(_PerReplicaSpec):  # type: ignore[misc, valid-type]
    """The type of a `CompletePerReplica`: the `tf.TypeSpec`s of its values."""

    value_type = property(lambda self: CompletePerReplica)

    def _from_components(self, components: Any) -> Any:
        return CompletePerReplica(components)


def calls_shard(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline calls `shard`, so that workers may draw different batches.

    >>> numbers = tf.data.Dataset.range(9)
    >>> calls_shard(numbers.batch(3)), calls_shard(numbers.shard(2, 0).batch(3))
    (False, True)
    """
    return any(type(node).__name__ == "_ShardDataset" for node in pipeline_nodes([dataset]))


def mark_complete(dataset: Any) -> Any:
    """Returns a distributed dataset, whose replicas draw complete batches, with `CompletePerReplica` values.

    It shares the state of `dataset`, which does not change.
    """
    patch_marked_iterators()
    marked = copy.copy(dataset)
    marked._element_spec = tf.nest.map_structure(
        lambda spec: CompletePerReplicaSpec(*spec._value_specs), dataset._element_spec
    )
    return marked


def is_complete(data: Any) -> bool:
    """Whether `data` is a batch, or has one in its structure, of a dataset that `mark_complete` returned."""
    return any(isinstance(leaf, CompletePerReplica) for leaf in tf.nest.flatten(data))


def parts_of_complete(data: Any, part_of: Callable[[Any, int], Any]) -> Any:
    """Returns `data` with the values of the replicas in place of complete batches.

    Args:
        data: A structure with `CompletePerReplica` values.
        part_of: Takes such a structure for one replica, with tensors in their place, and the index of the local
            replica. Returns its part.
    """
    leaves = tf.nest.flatten(data)
    marked = [position for position, leaf in enumerate(leaves) if isinstance(leaf, CompletePerReplica)]
    replicas = len(leaves[marked[0]].values)
    parts = [part_of([leaves[position].values[index] for position in marked], index) for index in range(replicas)]
    for number, position in enumerate(marked):
        leaves[position] = _PerReplica([part[number] for part in parts])
    return tf.nest.pack_sequence_as(data, leaves)


@patch
def patch_marked_iterators() -> None:
    """Makes TensorFlow's distributed iterators draw marked batches. More calls have no effect."""
    replace(_Iterator, "get_next")(_or_marked(_Iterator.get_next, _get_next))
    replace(_Iterator, "get_next_as_optional")(_or_marked(_Iterator.get_next_as_optional, _get_next_as_optional))


def _or_marked(stock: Callable[..., Any], draw: Callable[[Any], Any]) -> Callable[..., Any]:
    def draw_marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        specs = tf.nest.flatten(getattr(self, "_element_spec", None))
        is_marked = any(isinstance(spec, CompletePerReplicaSpec) for spec in specs)
        return draw(self) if is_marked else stock(self, *args, **kwargs)

    return draw_marked


def _get_next(iterator: Any) -> Any:
    if not iterator._enable_get_next_as_optional:
        return _next(iterator)
    optionals, replicas = draw_optionals(iterator)
    return tf.cond(replicas > 0, lambda: _values(iterator, optionals), lambda: _next(iterator))


def _get_next_as_optional(iterator: Any) -> Any:
    optionals, replicas = draw_optionals(iterator)
    return tf.cond(
        replicas > 0,
        lambda: tf.experimental.Optional.from_value(_values(iterator, optionals)),
        lambda: tf.experimental.Optional.empty(iterator._element_spec),
    )


def _values(iterator: Any, optionals: list[Any]) -> Any:
    batches = []
    for optional, device in zip(optionals, iterator._input_workers.compute_devices_for_worker(0), strict=True):
        with tf.device(device):
            check = tf.debugging.Assert(
                optional.has_value(),
                [
                    "The data of this worker has ended and that of another one has not. Expected: all workers draw the "
                    "same batches, of which each computes its rows. Received: fewer batches. Give all workers the same "
                    "data, or create the strategy without `load_balancing` and `shares`."
                ],
            )
            with tf.control_dependencies([] if check is None else [check]):
                batches.append(optional.get_value())
    return _marked(regroup(tuple(batches), always_wrap=True))


def _next(iterator: Any) -> Any:
    return _marked(iterator._get_next_no_partial_batch_handling())


def _marked(batch: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: CompletePerReplica(leaf.values), batch)
