"""tf.data pipelines, plain and distributed: what decides their order, and how to begin in their middle."""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private

_OPS = "tensorflow.python.data.ops"
_INPUT = "tensorflow.python.distribute.input_lib"

_Shuffle = private(f"{_OPS}.shuffle_op:_ShuffleDataset", "tells the seeds of a shuffle")
_Random = private(f"{_OPS}.random_op:_RandomDataset", "tells the seeds of random numbers")
_Distributed = private(f"{_INPUT}:DistributedDataset", "is rebuilt to skip on each worker, behind sharding")
FromFunction = private(f"{_INPUT}:DistributedDatasetsFromFunction", "is rebuilt in the same way")

Seeds = list[list[int]]

_UNSEEDED = [0, 0]
# Whose iterator makes that of its input at once. Any other kind is taken for one that may not: slower, and right.
_MAKES_ITS_INPUT = frozenset(
    "_BatchDataset _FilterDataset _FlatMapDataset _InterleaveDataset _MapDataset _OptionsDataset _PaddedBatchDataset "
    "_ParallelBatchDataset _ParallelInterleaveDataset _ParallelMapDataset _PrefetchDataset _RebatchDataset "
    "_RestructuredDataset _ShardDataset _SkipDataset _TakeDataset _UnbatchDataset _ZipDataset".split()
)


def shuffle_seeds(dataset: Any) -> Seeds:
    """The two seeds of every random part of a pipeline, from its end to its source; `[0, 0]` where it has none.

    Random parts are `shuffle`, `Dataset.random`, and random operations in functions that a data set maps.

    >>> numbers = tf.data.Dataset.range(9)
    >>> (of_the_graph, of_the_shuffle), = shuffle_seeds(numbers.shuffle(3, seed=5).batch(3))
    >>> of_the_shuffle
    5
    """
    seeds = []
    for node in nodes(roots(dataset)):
        if isinstance(node, _Shuffle | _Random):
            seeds.append([int(node._seed), int(node._seed2)])
        for wrapper in node._functions():
            for operation in wrapper.function.graph.get_operations():
                attributes = operation.node_def.attr
                if "seed" in attributes and "seed2" in attributes:
                    seeds.append([attributes["seed"].i, attributes["seed2"].i])
    return seeds


def is_unseeded(seeds: Seeds) -> bool:
    """Whether a random part has no seed, so that no other process draws the same."""
    return _UNSEEDED in seeds


def decisive_batches(dataset: Any) -> int | None:
    """How many batches of an iterator must be drawn for it to decide the order of later ones; `None`: all that were.

    A shuffle draws its order when its iterator is made. That of a part within a pipeline is made with the whole one's,
    but behind another shuffle with the first batch, and behind `repeat`, `cache` and the like in their own time.

    >>> numbers = tf.data.Dataset.range(9)
    >>> decisive_batches(numbers.shuffle(9, seed=1).batch(3)), decisive_batches(numbers.repeat().shuffle(9, seed=1))
    (0, 0)
    >>> decisive_batches(numbers.shuffle(9, seed=1).shuffle(9, seed=2))
    1
    >>> decisive_batches(numbers.shuffle(9, seed=1).repeat(2)) is None
    True
    """
    behind = [
        node
        for node in nodes(roots(dataset))
        if any(isinstance(above, _Shuffle | _Random) for above in nodes(node._inputs()))
    ]
    if not all(isinstance(node, _Shuffle) or type(node).__name__ in _MAKES_ITS_INPUT for node in behind):
        return None
    return int(any(isinstance(node, _Shuffle) for node in behind))


def share_a_shuffle(one: Any, other: Any) -> bool:
    """Whether two data sets are made from the same shuffle, so that an iterator of one moves the other's order on.

    >>> shuffled = tf.data.Dataset.range(9).shuffle(9, seed=1)
    >>> share_a_shuffle(shuffled.skip(3), shuffled.take(3)), share_a_shuffle(shuffled, tf.data.Dataset.range(3))
    (True, False)
    """

    def shuffles(dataset: Any) -> set[int]:
        pipeline = nodes(roots(dataset))
        return {id(node) for node in pipeline if isinstance(node, _Shuffle) and node._reshuffle_each_iteration}

    return not shuffles(one).isdisjoint(shuffles(other))


def make_iterator(dataset: Any) -> None:
    """Makes an iterator and lets it go: what a shuffle draws for one is drawn.

    On the parts of a distributed data set themselves, as plain iterators, which are a hundred times cheaper.
    """
    for part in _parts(dataset):
        iter(part)


def without_first(dataset: Any, steps: int) -> Any | None:
    """A data set like `dataset` that leaves out the batches of its first `steps` steps, reading but not moving them.

    It shares the original's random state. A distributed one leaves out the worker's own batches, behind sharding and
    rebatching, so that it is right for every way to share data out.

    Returns:
      The data set; `None` for a kind that is not known.
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
    shorter = type(dataset)(workers, dataset._strategy, **arguments)
    # What Keras' step is traced with; it asks for it only to know whether the data ends.
    shorter._cardinality = dataset._cardinality
    shorter._enable_get_next_as_optional = dataset._enable_get_next_as_optional
    return shorter


def _parts(dataset: Any) -> list[Any]:
    """The data sets of this process that iterators are made of."""
    if type(dataset) is _Distributed:
        return list(dataset._cloned_datasets)
    return list(dataset._datasets) if type(dataset) is FromFunction else [dataset]


def roots(dataset: Any) -> list[Any]:
    """The data sets as the user has made them, before they were shared out."""
    return [dataset._original_dataset] if type(dataset) is _Distributed else _parts(dataset)


def nodes(datasets: Iterable[Any]) -> Iterator[Any]:
    """Every data set of the pipelines that end in `datasets`, each once."""
    seen: set[int] = set()
    waiting = list(datasets)
    while waiting:
        node = waiting.pop(0)
        if id(node) not in seen and isinstance(node, tf.data.Dataset):
            seen.add(id(node))
            yield node
            waiting += node._inputs()
