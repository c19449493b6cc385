"""What a tf.data pipeline tells of itself: its order, its sharing out, its batches, the Python code within it."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.input_pipeline import FromFunction, nodes, roots

_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "MatchingFilesDataset")
_BATCHES = frozenset("_BatchDataset _ParallelBatchDataset _PaddedBatchDataset".split())
_SMALL_BYTES = 1 << 24


def is_unordered(dataset: Any) -> bool:
    """Whether elements may come in the order in which threads are done with them: `deterministic=False`.

    >>> numbers = tf.data.Dataset.range(9)
    >>> is_unordered(numbers.map(abs, 2)), is_unordered(numbers.map(abs, 2, deterministic=False).batch(2))
    (False, True)
    >>> is_unordered(numbers.interleave(tf.data.Dataset.range, num_parallel_calls=2, deterministic=False))
    True
    """
    ends = roots(dataset)
    if any(end.options().deterministic is False for end in ends if isinstance(end, tf.data.Dataset)):
        return True
    pipeline = list(nodes(ends))
    if any(getattr(node, "_deterministic", None) == "false" for node in pipeline):
        return True
    operations = [*_operations(pipeline)]
    if any(type(node).__name__ == "_ParallelInterleaveDataset" for node in pipeline):
        operations += _operations_of_graph(pipeline)  # it keeps no note of that argument
    return any(operation.attr["deterministic"].s == b"false" for operation in operations if operation.attr)


def runs_python(dataset: Any) -> bool:
    """Whether Python code makes elements: `from_generator`, `py_function`, `numpy_function`."""
    return any(operation.op in _PYTHON for operation in _operations(nodes(roots(dataset))))


def python_functions(dataset: Any) -> list[Any]:
    """The functions that a pipeline was given."""
    return [wrapper._func for node in nodes(roots(dataset)) for wrapper in node._functions()]


def is_each_workers_own(dataset: Any) -> bool:
    """Whether every worker draws other elements than its part of common batches, so that its position is its own.

    So it is with `distribute_datasets_from_function`, and where files are shared out, or a worker shares out itself.

    >>> is_each_workers_own(tf.data.Dataset.range(9)), is_each_workers_own(tf.data.TextLineDataset(["one", "two"]))
    (False, True)
    """
    if isinstance(dataset, FromFunction):
        return True
    for end in roots(dataset):
        if not isinstance(end, tf.data.Dataset):
            continue
        policy = end.options().experimental_distribute.auto_shard_policy
        if policy == tf.data.experimental.AutoShardPolicy.OFF:
            return any(type(node).__name__ == "_ShardDataset" for node in nodes([end]))
        if policy == tf.data.experimental.AutoShardPolicy.FILE:
            return True
        if policy == tf.data.experimental.AutoShardPolicy.AUTO:
            kinds = [type(node).__name__ for node in nodes([end])]
            kinds += [operation.op for operation in _operations(nodes([end]))]
            return any(reader in kind for kind in kinds for reader in _READERS)
    return False


def batch_size(dataset: Any) -> int | None:
    """How many elements the batches of all workers have together; `None` where that is not known.

    >>> batch_size(tf.data.Dataset.range(9).batch(4).map(abs).prefetch(1))
    4
    """
    if isinstance(dataset, FromFunction):
        return None
    sizes = [node._batch_size for node in nodes(roots(dataset)) if type(node).__name__ in _BATCHES]
    try:
        return int(tf.get_static_value(sizes[0])) if sizes else None
    except (TypeError, ValueError):
        return None


def _operations(pipeline: Any) -> Iterator[Any]:
    """The operations in the functions of a pipeline, and in theirs, as nodes of a graph."""
    for node in pipeline:
        for wrapper in node._functions():
            definition = wrapper.function.graph.as_graph_def()
            yield from definition.node
            for function in definition.library.function:
                yield from function.node_def


def _operations_of_graph(pipeline: list[Any]) -> Iterator[Any]:
    """The pipeline itself as nodes of a graph; none where that would copy much data, or cannot be had."""
    tensors = [tensor for node in pipeline for tensor in getattr(node, "_tensors", [])]
    if sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors) > _SMALL_BYTES:
        return
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(pipeline[0]), external_state_policy=1
        )
        yield from tf.compat.v1.GraphDef.FromString(graph.numpy()).node
    except (tf.errors.OpError, TypeError, ValueError):
        return
