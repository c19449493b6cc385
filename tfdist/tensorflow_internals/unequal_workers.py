"""Reductions of workers with different numbers of devices: first over each worker's values, then over workers.

On a worker with one device TensorFlow cannot distinguish the value of a replica from a value of the worker. Two workers
would choose different groups for one reduction, and wait forever. By worker, all choose the same group.
"""

from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import simple_broadcast


def reduce_by_worker(reduce_op: Any, value: Any, destinations: Any, workers: Any, options: Any) -> Any:
    """Returns the sum or mean of the values of all workers, on `destinations`.

    Args:
        reduce_op: A `tf.distribute.ReduceOp`.
        value: The values of this worker's replicas, or one value of the worker, which then counts once.
        destinations: A device, or a value whose devices get the result.
        workers: The `AllReduce` of one group of all workers, on their hosts.
        options: A `tf.distribute.experimental.CommunicationOptions`.
    """
    total = _sum_over_workers(value, workers, options)
    if reduce_op == tf.distribute.ReduceOp.MEAN:
        count = _sum_over_workers(tf.constant(len(_values(value)), tf.int32), workers, options)
        total = _divided(total, count)
    return simple_broadcast(total, destinations)


def gather_by_worker(value: Any, destinations: Any, axis: int, workers: Any, options: Any) -> Any:
    """Returns the values of all workers, concatenated in the order of the replicas; see `reduce_by_worker`."""
    values = _values(value)
    with tf.device(workers.host):
        own = tf.concat(values, axis) if len(values) > 1 else tf.identity(values[0])
    return simple_broadcast(_only(workers._gather(own, workers.host, axis, options)), destinations)


def _sum_over_workers(value: Any, workers: Any, options: Any) -> Any:
    total = value
    if isinstance(value, tf.distribute.DistributedValues):
        to_host = tf.distribute.ReductionToOneDevice()
        total = _only(to_host.reduce(tf.distribute.ReduceOp.SUM, value, workers.host))
    return _only(workers.reduce(tf.distribute.ReduceOp.SUM, total, workers.host, options))


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value._values) if isinstance(value, tf.distribute.DistributedValues) else (value,)


def _only(value: Any) -> Any:
    """Returns the value on the single device of a reduction's result."""
    return _values(value)[0]


def _divided(total: Any, count: tf.Tensor) -> Any:
    if isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(total.values, count), total.indices, total.dense_shape)
    return total / tf.cast(count, total.dtype)
