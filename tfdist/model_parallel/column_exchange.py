"""What columns send to each other, as operations on the tensors of all columns in one graph.

TensorFlow's collectives hang between remote tasks of one function; copies between devices do not.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.model_parallel.columns import summed_over_columns
from tfdist.model_parallel.transfers import WEIGHT_GRADIENT, record_transfer


def sum_of_columns(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns for each column the sum of the columns' tensors."""
    return summed_over_columns(tensors, devices, [WEIGHT_GRADIENT])


def gather_columns(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns for each column the tensors of all columns, one after another along axis 0."""
    gathered = []
    for device in devices:
        record_transfer(WEIGHT_GRADIENT, tensors, device)
        with tf.device(device):
            gathered.append(tf.concat(list(tensors), 0))
    return gathered


def exchange_slices(slices: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Sends slice `i` of each column to column `i`.

    Args:
        slices: By column, of shape `[columns, length]`.
        devices: By column.

    Returns:
        By column, the slices that it has received, in the order of the columns.
    """
    sent = []
    for tensor, device in zip(slices, devices, strict=True):
        with tf.device(device):
            sent.append(tf.unstack(tensor, num=len(devices)))
    received = []
    for index, device in enumerate(devices):
        slices_of_all = [of_column[index] for of_column in sent]
        record_transfer(WEIGHT_GRADIENT, slices_of_all, device)
        with tf.device(device):
            received.append(tf.stack(slices_of_all))
    return received


EXCHANGES: dict[str, Callable[[Sequence[tf.Tensor], Sequence[str]], list[tf.Tensor]]] = {
    "sum": sum_of_columns,
    "gather": gather_columns,
    "exchange": exchange_slices,
}
