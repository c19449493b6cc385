"""Distributed datasets that begin in the middle, have the batches of one worker, or draw from another pipeline."""

from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.batch_selection import selectable
from tfdist.tensorflow_internals.input_pipeline import parts_of_dataset
from tfdist.tensorflow_internals.rows_per_replica import tensorflow_spec

_INPUT = "tensorflow.python.distribute.input_lib"

_Distributed = private(f"{_INPUT}:DistributedDataset", "is rebuilt to skip on each worker, after sharding")
_FromFunction = private(f"{_INPUT}:DistributedDatasetsFromFunction", "is rebuilt in the same way")
private(
    f"{_INPUT}:DistributedDataset._make_rebatch_fn",
    "sees the batch size of a dataset, but not beyond a function that is mapped",
)


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
    if type(dataset) not in (_Distributed, _FromFunction):
        return None
    workers = dataset._input_workers
    parts = []
    for index, part in enumerate(parts_of_dataset(dataset)):
        with tf.device(part._variant_tensor.device):
            parts.append(part.skip(steps * len(workers.compute_devices_for_worker(index))))
    spec = tensorflow_spec(dataset._element_spec)
    arguments = {"components": parts, "element_spec": spec, "options": dataset._options}
    arguments["replica_order"] = dataset._replica_order
    if type(dataset) is _Distributed:
        arguments["enable_get_next_as_optional"] = dataset._enable_get_next_as_optional
    return _as_traced(type(dataset)(workers, dataset._strategy, **arguments), dataset)


def distribute_worker_batches(
    dataset: Any, batches: tf.data.Dataset, strategy: Any, input_context: Any, workers: Any, options: Any
) -> Any:
    """Returns the distributed dataset of `batches`, which one worker's replicas draw in turn.

    TensorFlow shards `batches` over the input pipelines of `input_context`. `dataset` is that of global batches.
    """
    distributed = _Distributed(workers, strategy, batches, input_context=input_context, options=options)
    distributed._original_dataset = dataset
    distributed._cardinality = int(dataset.cardinality())
    return distributed


def distribute_shown_batches(
    dataset: Any, shown: tf.data.Dataset, strategy: Any, input_context: Any, workers: Any, replicas: int, options: Any
) -> Any:
    """Returns the distributed dataset of `dataset`, divided as TensorFlow does; its batches are drawn from `shown`."""
    distributed = _Distributed(
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
