"""tf.data pipelines, plain and distributed: what determines their order, and how to start in the middle."""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private

_OPS = "tensorflow.python.data.ops"
_INPUT = "tensorflow.python.distribute.input_lib"

_Shuffle = private(f"{_OPS}.shuffle_op:_ShuffleDataset", "holds the seeds of a shuffle")
_Random = private(f"{_OPS}.random_op:_RandomDataset", "holds the seeds of random numbers")
_Distributed = private(f"{_INPUT}:DistributedDataset", "is rebuilt to skip on each worker, after sharding")
FromFunction = private(f"{_INPUT}:DistributedDatasetsFromFunction", "is rebuilt in the same way")

Seeds = list[list[int]]

_UNSEEDED = [0, 0]
# Datasets whose iterator creates that of its input at once. Any other kind is treated as one that may not: slower, but
# correct.
_CREATES_INPUT_AT_ONCE = frozenset(
    "_BatchDataset _FilterDataset _FlatMapDataset _InterleaveDataset _MapDataset _OptionsDataset _PaddedBatchDataset "
    "_ParallelBatchDataset _ParallelInterleaveDataset _ParallelMapDataset _PrefetchDataset _RebatchDataset "
    "_RestructuredDataset _ShardDataset _SkipDataset _TakeDataset _UnbatchDataset _ZipDataset".split()
)


def random_seeds(dataset: Any) -> Seeds:
    """Returns the two seeds of every random part of a pipeline, from its end to its source; `[0, 0]` if unseeded.

    Random parts are `shuffle`, `Dataset.random`, and random operations in functions that a dataset maps.

    >>> numbers = tf.data.Dataset.range(9)
    >>> (of_the_graph, of_the_shuffle), = random_seeds(numbers.shuffle(3, seed=5).batch(3))
    >>> of_the_shuffle
    5
    """
    seeds = []
    for node in pipeline_nodes(user_datasets(dataset)):
        if isinstance(node, _Shuffle | _Random):
            seeds.append([int(node._seed), int(node._seed2)])
        for wrapper in node._functions():
            for operation in wrapper.function.graph.get_operations():
                attributes = operation.node_def.attr
                if "seed" in attributes and "seed2" in attributes:
                    seeds.append([attributes["seed"].i, attributes["seed2"].i])
    return seeds


def has_unseeded(seeds: Seeds) -> bool:
    """Whether a random part has no seed, so that another process draws other numbers."""
    return _UNSEEDED in seeds


def batches_to_replay(dataset: Any) -> int | None:
    """Returns how many batches of an iterator determine the order of later iterators; `None`: all that were drawn.

    A shuffle draws its order when its iterator is created. Within a pipeline that is when the pipeline's iterator is
    created; before another shuffle, with the first batch; before `repeat`, `cache` and the like, at other times.

    >>> numbers = tf.data.Dataset.range(9)
    >>> batches_to_replay(numbers.shuffle(9, seed=1).batch(3)), batches_to_replay(numbers.repeat().shuffle(9, seed=1))
    (0, 0)
    >>> batches_to_replay(numbers.shuffle(9, seed=1).shuffle(9, seed=2))
    1
    >>> batches_to_replay(numbers.shuffle(9, seed=1).repeat(2)) is None
    True
    """
    after_random = [
        node
        for node in pipeline_nodes(user_datasets(dataset))
        if any(isinstance(input_node, _Shuffle | _Random) for input_node in pipeline_nodes(node._inputs()))
    ]
    if not all(isinstance(node, _Shuffle) or type(node).__name__ in _CREATES_INPUT_AT_ONCE for node in after_random):
        return None
    return int(any(isinstance(node, _Shuffle) for node in after_random))


def share_a_shuffle(one: Any, other: Any) -> bool:
    """Whether two datasets come from the same shuffle, so that an iterator over one advances the order of the other.

    >>> shuffled = tf.data.Dataset.range(9).shuffle(9, seed=1)
    >>> share_a_shuffle(shuffled.skip(3), shuffled.take(3)), share_a_shuffle(shuffled, tf.data.Dataset.range(3))
    (True, False)
    """

    def shuffles(dataset: Any) -> set[int]:
        nodes = pipeline_nodes(user_datasets(dataset))
        return {id(node) for node in nodes if isinstance(node, _Shuffle) and node._reshuffle_each_iteration}

    return not shuffles(one).isdisjoint(shuffles(other))


def create_unused_iterator(dataset: Any) -> None:
    """Creates an iterator and discards it, which advances the order of a shuffle.

    Iterates over the parts of a distributed dataset as plain datasets, which is a hundred times cheaper.
    """
    for part in _parts(dataset):
        iter(part)


def skip_steps(dataset: Any, steps: int) -> Any | None:
    """Returns a dataset without the batches of the first `steps` steps, which are read but not moved to the devices.

    It shares the random state of `dataset`. A distributed one skips the worker's own batches, after sharding and
    rebatching, so it is correct for every sharding policy.

    Returns:
        The dataset; `None` for an unknown kind of dataset.
    """
    if isinstance(dataset, tf.data.Dataset):
        return dataset.skip(steps)
    if type(dataset) not in (_Distributed, FromFunction):
        return None
    workers = dataset._input_workers
    parts = []
    for index, part in enumerate(_parts(dataset)):
        with tf.device(part._variant_tensor.device):
            parts.append(part.skip(steps * len(workers.compute_devices_for_worker(index))))
    arguments = {"components": parts, "element_spec": dataset._element_spec, "options": dataset._options}
    arguments["replica_order"] = dataset._replica_order
    if type(dataset) is _Distributed:
        arguments["enable_get_next_as_optional"] = dataset._enable_get_next_as_optional
    rest = type(dataset)(workers, dataset._strategy, **arguments)
    # Keras' step was traced with these; it uses the cardinality only to know whether the data ends.
    rest._cardinality = dataset._cardinality
    rest._enable_get_next_as_optional = dataset._enable_get_next_as_optional
    return rest


def user_datasets(dataset: Any) -> list[Any]:
    """Returns the datasets as the user created them, before they were distributed."""
    return [dataset._original_dataset] if type(dataset) is _Distributed else _parts(dataset)


def pipeline_nodes(datasets: Iterable[Any]) -> Iterator[Any]:
    """Yields every dataset of the pipelines that end in `datasets`, each once."""
    seen: set[int] = set()
    waiting = list(datasets)
    while waiting:
        node = waiting.pop(0)
        if id(node) not in seen and isinstance(node, tf.data.Dataset):
            seen.add(id(node))
            yield node
            waiting += node._inputs()


def _parts(dataset: Any) -> list[Any]:
    """Returns the datasets of this process that iterators are created over."""
    if type(dataset) is _Distributed:
        return list(dataset._cloned_datasets)
    return list(dataset._datasets) if type(dataset) is FromFunction else [dataset]
