"""Traits of a tf.data pipeline: deterministic order, sharding, batch size, Python code within it."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.input_pipeline import FromFunction, pipeline_nodes, user_datasets

_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "MatchingFilesDataset")
_BATCHES = frozenset("_BatchDataset _ParallelBatchDataset _PaddedBatchDataset".split())
_SMALL_BYTES = 1 << 24


def is_unordered(dataset: Any) -> bool:
    """Whether elements may come in the order in which threads finish them: `deterministic=False`.

    >>> numbers = tf.data.Dataset.range(9)
    >>> is_unordered(numbers.map(abs, 2)), is_unordered(numbers.map(abs, 2, deterministic=False).batch(2))
    (False, True)
    >>> is_unordered(numbers.interleave(tf.data.Dataset.range, num_parallel_calls=2, deterministic=False))
    True
    """
    ends = user_datasets(dataset)
    if any(end.options().deterministic is False for end in ends if isinstance(end, tf.data.Dataset)):
        return True
    pipeline = list(pipeline_nodes(ends))
    if any(getattr(node, "_deterministic", None) == "false" for node in pipeline):
        return True
    operations = [*_operations(pipeline)]
    if any(type(node).__name__ == "_ParallelInterleaveDataset" for node in pipeline):
        operations += _operations_of_graph(pipeline)  # it does not store that argument
    return any(operation.attr["deterministic"].s == b"false" for operation in operations if operation.attr)


def runs_python(dataset: Any) -> bool:
    """Whether Python code creates elements: `from_generator`, `py_function`, `numpy_function`."""
    return any(operation.op in _PYTHON for operation in _operations(pipeline_nodes(user_datasets(dataset))))


def python_functions(dataset: Any) -> list[Any]:
    """Returns the Python functions that were given to a pipeline."""
    return [wrapper._func for node in pipeline_nodes(user_datasets(dataset)) for wrapper in node._functions()]


def is_per_worker(dataset: Any) -> bool:
    """Whether each worker draws different elements, instead of its part of common batches.

    That is so with `distribute_datasets_from_function`, with sharding by files, and if the pipeline calls `shard`.

    >>> is_per_worker(tf.data.Dataset.range(9)), is_per_worker(tf.data.TextLineDataset(["one", "two"]))
    (False, True)
    """
    if isinstance(dataset, FromFunction):
        return True
    for end in user_datasets(dataset):
        if not isinstance(end, tf.data.Dataset):
            continue
        policy = end.options().experimental_distribute.auto_shard_policy
        if policy == tf.data.experimental.AutoShardPolicy.OFF:
            return any(type(node).__name__ == "_ShardDataset" for node in pipeline_nodes([end]))
        if policy == tf.data.experimental.AutoShardPolicy.FILE:
            return True
        if policy == tf.data.experimental.AutoShardPolicy.AUTO:
            kinds = [type(node).__name__ for node in pipeline_nodes([end])]
            kinds += [operation.op for operation in _operations(pipeline_nodes([end]))]
            return any(reader in kind for kind in kinds for reader in _READERS)
    return False


def batch_size(dataset: Any) -> int | None:
    """Returns the number of elements in a batch of all workers; `None` if unknown.

    >>> batch_size(tf.data.Dataset.range(9).batch(4).map(abs).prefetch(1))
    4
    """
    if isinstance(dataset, FromFunction):
        return None
    sizes = [node._batch_size for node in pipeline_nodes(user_datasets(dataset)) if type(node).__name__ in _BATCHES]
    try:
        return int(tf.get_static_value(sizes[0])) if sizes else None
    except (TypeError, ValueError):
        return None


def _operations(pipeline: Any) -> Iterator[Any]:
    """Yields the operations in the functions of a pipeline, and in the functions that these call, as `NodeDef`s."""
    for node in pipeline:
        for wrapper in node._functions():
            definition = wrapper.function.graph.as_graph_def()
            yield from definition.node
            for function in definition.library.function:
                yield from function.node_def


def _operations_of_graph(pipeline: list[Any]) -> Iterator[Any]:
    """Yields the datasets of a pipeline as `NodeDef`s; none if that would copy much data, or fails."""
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
