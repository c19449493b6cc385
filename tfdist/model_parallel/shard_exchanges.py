"""Sums and gathers over the devices of a stage, by copies between them.

TensorFlow's collectives hang between remote tasks of one function; copies between devices do not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.transfers import record_transfer


def summed_over_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], kind: str, rows: Any) -> list[tf.Tensor]:
    """Returns for each device the sum of all tensors, bit-identical.

    Each device adds one slice of all tensors and sends the sum to the others: `2 (k - 1) / k` of the size in total, as
    in a ring. With two devices, or an axis of features that is not divisible, each sends its tensor to all others.

    Args:
        tensors: By device, of equal shapes.
        devices: Their full names.
        kind: As what the transfers are recorded.
        rows: The size of the first axis if it is not static.
    """
    ways, width = len(devices), tensors[0].shape[-1] if tensors[0].shape.rank else None
    if ways == 2 or width is None or width % ways:
        return _for_each(devices, kind, rows, list(tensors), tf.add_n)
    slices = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            slices.append(tf.split(tensor, ways, -1))
    partial = []
    for index, device in enumerate(devices):
        received = [of_device[index] for of_device in slices]
        record_transfer(kind, received, device, rows=rows)
        with tf.device(device):
            partial.append(tf.add_n(received))
    return _for_each(devices, kind, rows, partial, lambda sums: tf.concat(sums, -1))


def gathered_from_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], kind: str, rows: Any) -> list[tf.Tensor]:
    """Returns for each device the tensors of all, stacked along a new first axis. Arguments: `summed_over_shards`."""
    return _for_each(devices, kind, rows, list(tensors), tf.stack)


def _for_each(
    devices: Sequence[str], kind: str, rows: Any, sent: list[tf.Tensor], combine: Callable[..., tf.Tensor]
) -> list[tf.Tensor]:
    results = []
    for device in devices:
        record_transfer(kind, sent, device, rows=rows)
        with tf.device(device):
            results.append(combine(sent))
    return results
