"""tf.data pipelines, plain and distributed: what determines their order, their traits, how to start in the middle."""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.batch_selection import selectable
from tfdist.tensorflow_internals.function_graphs import operations_behind
from tfdist.tensorflow_internals.rows_per_replica import tensorflow_spec

_OPS = "tensorflow.python.data.ops"
_INPUT = "tensorflow.python.distribute.input_lib"

_Shuffle = private(f"{_OPS}.shuffle_op:_ShuffleDataset", "holds the seeds of a shuffle")
_Random = private(f"{_OPS}.random_op:_RandomDataset", "holds the seeds of random numbers")
DistributedDataset = private(f"{_INPUT}:DistributedDataset", "is rebuilt to skip on each worker, after sharding")
_auto_shard = private(
    "tensorflow.python.distribute.input_ops:auto_shard_dataset", "decides whether the files of a dataset are sharded"
)
_batch_size = private(
    "tensorflow.python.data.experimental.ops.distribute:compute_batch_size", "the size of a dataset's batches"
)
_FromFunction = private(f"{_INPUT}:DistributedDatasetsFromFunction", "is rebuilt in the same way")

Seeds = list[list[int]]

_UNSEEDED = [0, 0]
# Datasets whose iterator creates that of its input at once. Any other kind is treated as one that may not: slower, but
# correct.
_CREATES_INPUT_AT_ONCE = frozenset(
    "_BatchDataset _FilterDataset _FlatMapDataset _InterleaveDataset _MapDataset _OptionsDataset _PaddedBatchDataset "
    "_ParallelBatchDataset _ParallelInterleaveDataset _ParallelMapDataset _PrefetchDataset _RebatchDataset "
    "_RestructuredDataset _ShardDataset _SkipDataset _TakeDataset _UnbatchDataset _ZipDataset "
    "_AssertCardinalityDataset SelectableDataset".split()
)
_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "MatchingFilesDataset")
_BATCHES = frozenset("_BatchDataset _ParallelBatchDataset _PaddedBatchDataset".split())
_SMALL_BYTES = 1 << 24


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
    others = reshuffles(other)
    return any(shuffle is known for shuffle in reshuffles(one) for known in others)


def reshuffles(dataset: Any) -> list[Any]:
    """Returns the shuffles of a pipeline whose order changes with each iterator."""
    nodes = pipeline_nodes(user_datasets(dataset))
    return [node for node in nodes if isinstance(node, _Shuffle) and node._reshuffle_each_iteration]


def create_unused_iterator(dataset: Any) -> None:
    """Creates an iterator and discards it, which advances the order of a shuffle.

    Iterates over the parts of a distributed dataset as plain datasets, which is a hundred times cheaper.
    """
    for part in parts_of_dataset(dataset):
        iter(part)


def reads_files(dataset: tf.data.Dataset, workers: int, rank: int) -> bool:
    """Whether TensorFlow would shard the files that `dataset` reads, and not its elements."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    try:
        _auto_shard(dataset.with_options(options), workers, rank)
    except tf.errors.NotFoundError:
        return False
    return True


def constant_batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the size of the batches of `dataset`, except the last; `None` if it is not the same for all."""
    size = int(_batch_size(dataset))
    return None if size < 0 else size


def user_datasets(dataset: Any) -> list[Any]:
    """Returns the datasets as the user created them, before they were distributed."""
    return [dataset._original_dataset] if type(dataset) is DistributedDataset else parts_of_dataset(dataset)


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


def calls_shard(dataset: tf.data.Dataset) -> bool:
    """Whether a pipeline calls `shard`, so that workers may draw different batches.

    >>> numbers = tf.data.Dataset.range(9)
    >>> calls_shard(numbers.batch(3)), calls_shard(numbers.shard(2, 0).batch(3))
    (False, True)
    """
    return any(type(node).__name__ == "_ShardDataset" for node in pipeline_nodes([dataset]))


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


def random_operations(graph: Any) -> set[str]:
    """Returns the operations of a pipeline's function that draw random numbers, or call Python, which may, by name."""
    definition = graph.as_graph_def()
    called = {function.signature.name: function.node_def for function in definition.library.function}
    changes_variables = any("Assign" in node.op for node in definition.node)

    def draws(nodes: Iterable[Any], seen: frozenset[str]) -> bool:
        for node in nodes:
            # The seed generators of Keras are variables.
            if node.op in _PYTHON or "Rng" in node.op or ("seed" in node.attr and "seed2" in node.attr):
                return True
            if changes_variables and node.op == "ReadVariableOp":
                return True
            functions = [value.func for value in node.attr.values() if value.HasField("func")]
            functions += [function for value in node.attr.values() for function in value.list.func]
            for name in {function.name for function in functions} - seen:
                if draws(called.get(name, ()), seen | {name}):
                    return True
        return False

    return {node.name for node in definition.node if draws([node], frozenset())}


def random_parts(dataset: Any, known: dict[int, list[bool]] | None = None) -> list[bool]:
    """Returns which parts of the flattened elements depend on random numbers that threads draw in any order.

    `known` are the results for datasets of the same pipeline, by their ids.
    """
    known = {} if known is None else known
    if id(dataset) not in known:
        inputs = [random_parts(input_dataset, known) for input_dataset in dataset._inputs()]
        known[id(dataset)] = _of_inputs(dataset, inputs)
    return known[id(dataset)]


def batches_may_be_arrays(dataset: Any) -> bool:
    """Whether batches may be in the memory of arrays that Python code returned. `batch` copies elements.

    >>> generated = tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([]))
    >>> batches_may_be_arrays(generated.prefetch(1)), batches_may_be_arrays(generated.batch(3))
    (True, False)
    """
    waiting = user_datasets(dataset)
    while waiting:
        node = waiting.pop()
        if isinstance(node, tf.data.Dataset) and type(node).__name__ not in _BATCHES:
            if any(operation.op in _PYTHON for operation in _operations([node])):
                return True
            waiting.extend(node._inputs())
    return False


def python_functions(dataset: Any) -> list[Any]:
    """Returns the Python functions that were given to a pipeline."""
    return [wrapper._func for node in pipeline_nodes(user_datasets(dataset)) for wrapper in node._functions()]


def is_per_worker(dataset: Any) -> bool:
    """Whether each worker draws different elements, instead of its part of common batches.

    That is so with `distribute_datasets_from_function`, with sharding by files or by hints, and if the pipeline calls
    `shard`.

    >>> is_per_worker(tf.data.Dataset.range(9)), is_per_worker(tf.data.TextLineDataset(["one", "two"]))
    (False, True)
    """
    if isinstance(dataset, _FromFunction):
        return True
    for end in user_datasets(dataset):
        if not isinstance(end, tf.data.Dataset):
            continue
        policy = end.options().experimental_distribute.auto_shard_policy
        if policy == tf.data.experimental.AutoShardPolicy.OFF:
            return calls_shard(end)
        if policy in (tf.data.experimental.AutoShardPolicy.FILE, tf.data.experimental.AutoShardPolicy.HINT):
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
    if isinstance(dataset, _FromFunction):
        return None
    original = selectable(dataset)
    if original is not None:
        return original.batch_size
    sizes = [node._batch_size for node in pipeline_nodes(user_datasets(dataset)) if type(node).__name__ in _BATCHES]
    try:
        return int(tf.get_static_value(sizes[0])) if sizes else None
    except (TypeError, ValueError):
        return None


def parts_of_dataset(dataset: Any) -> list[Any]:
    """Returns the datasets of this process that iterators are created over."""
    if type(dataset) is DistributedDataset:
        return list(dataset._cloned_datasets)
    return list(dataset._datasets) if type(dataset) is _FromFunction else [dataset]


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


def _of_inputs(node: Any, inputs: list[list[bool]]) -> list[bool]:
    parts = len(tf.nest.flatten(node.element_spec))
    drawn = [flag for flags in inputs for flag in flags]
    functions = [wrapper.function.graph for wrapper in node._functions()]
    if not functions:
        return drawn if len(drawn) == parts else [any(drawn)] * parts
    is_parallel = "Parallel" in type(node).__name__
    graph = functions[0]
    if len(functions) > 1 or len(graph.outputs) != parts or len(inputs) != 1 or len(graph.inputs) < len(drawn):
        draws = is_parallel and any(random_operations(function_graph) for function_graph in functions)
        return [draws or any(drawn)] * parts
    sources = {id(tensor.op) for tensor, flag in zip(graph.inputs, drawn, strict=False) if flag}
    if is_parallel:
        sources |= {id(graph.get_operation_by_name(name)) for name in random_operations(graph)}
    return [any(id(operation) in sources for operation in operations_behind(output.op)) for output in graph.outputs]


def skip_steps(dataset: Any, steps: int) -> Any | None:
    """Returns a dataset without the batches of the first `steps` steps, which are read but not moved to the devices.

    It shares the random state of `dataset`. A distributed one skips the worker's own batches, after sharding and
    rebatching, so it is correct for every sharding policy.

    Returns:
        The dataset; `None` for an unknown kind of dataset.
    """
    original = selectable(dataset)
    unread = None if original is None else original.skipped(steps)
    if unread is not None:
        return distributed_alike(dataset, unread)
    if isinstance(dataset, tf.data.Dataset):
        return dataset.skip(steps)
    if type(dataset) not in (DistributedDataset, _FromFunction):
        return None
    workers = dataset._input_workers
    parts = []
    for index, part in enumerate(parts_of_dataset(dataset)):
        with tf.device(part._variant_tensor.device):
            parts.append(part.skip(steps * len(workers.compute_devices_for_worker(index))))
    spec = tensorflow_spec(dataset._element_spec)
    arguments = {"components": parts, "element_spec": spec, "options": dataset._options}
    arguments["replica_order"] = dataset._replica_order
    if type(dataset) is DistributedDataset:
        arguments["enable_get_next_as_optional"] = dataset._enable_get_next_as_optional
    return _as_traced(type(dataset)(workers, dataset._strategy, **arguments), dataset)


def distribute_shown_batches(
    dataset: Any, shown: tf.data.Dataset, strategy: Any, input_context: Any, workers: Any, replicas: int, options: Any
) -> Any:
    """Returns the distributed dataset of `dataset`, divided as TensorFlow does; its batches are drawn from `shown`."""
    distributed = DistributedDataset(
        workers,
        strategy,
        dataset,
        num_replicas_in_sync=replicas,
        input_context=input_context,
        build=False,
        options=options,
    )
    by_size = distributed._make_rebatch_fn
    distributed._make_rebatch_fn = lambda _, *args: by_size(dataset, *args)
    distributed.build(shown)
    del distributed._make_rebatch_fn
    return distributed


def distributed_alike(dataset: Any, batches: tf.data.Dataset) -> Any:
    """Returns other batches, distributed as `dataset` is; `batches` themselves if it is not distributed."""
    if isinstance(dataset, tf.data.Dataset):
        return batches
    return _as_traced(dataset._strategy.experimental_distribute_dataset(batches, dataset._options), dataset)


def _as_traced(distributed: Any, dataset: Any) -> Any:
    """Returns a distributed dataset with what Keras' step was traced with for another one.

    The step uses the cardinality only to know whether the data ends.
    """
    distributed._cardinality = dataset._cardinality
    distributed._enable_get_next_as_optional = dataset._enable_get_next_as_optional
    distributed._element_spec = dataset._element_spec
    return distributed


def batch_types(dataset: Any) -> Any:
    """Returns the types of a distributed dataset's batches, with the sizes that `element_spec` drops."""
    return dataset._element_spec


def asks_for_the_end(dataset: Any) -> bool:
    """Whether the iterators of a distributed dataset ask all workers for the end of the data."""
    return bool(dataset._enable_get_next_as_optional)


def num_own_replicas(dataset: Any) -> int:
    """Returns the number of replicas of this worker that draw batches of a distributed dataset."""
    return len(dataset._input_workers.compute_devices_for_worker(0))


def type_of_first_part(spec: Any) -> Any:
    """Returns the type of the first replica's part, for the type of a distributed batch; others are returned as is."""
    return getattr(spec, "_value_specs", [spec])[0]
