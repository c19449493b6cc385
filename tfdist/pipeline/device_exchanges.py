"""Sums, gathers and exchanges by copies from device to device. All devices get bit-identical results."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.pipeline.transfers import DENSE, WEIGHT_GRADIENT, record_transfer

_SLICED_FROM = 1 << 14  # elements; the slices of a smaller gradient cost more than they save


def summed_over_columns(
    gradients: Sequence[Any], devices: Sequence[str], kinds: Sequence[str] = (WEIGHT_GRADIENT, DENSE)
) -> list[Any]:
    """Returns for each column the sum of all columns' gradients of a variable.

    Args:
        gradients: By column, dense or `tf.IndexedSlices`; None if a column has none.
        devices: By column, where the variable is.
        kinds: As what the transfers are recorded.
    """
    present = [(one, device) for one, device in zip(gradients, devices, strict=True) if one is not None]
    if not present:
        return [None] * len(devices)
    if len(devices) == 1:
        return list(gradients)
    if all(isinstance(gradient, tf.IndexedSlices) for gradient, _ in present):
        return _for_each(devices, [gradient for gradient, _ in present], _joined_rows, kinds)
    dense = []
    for gradient, device in present:
        with tf.device(device):
            dense.append(tf.convert_to_tensor(gradient))
    count, elements = len(devices), dense[0].shape.num_elements()
    if count == 2 or elements is None or elements < _SLICED_FROM:
        return _for_each(devices, dense, tf.add_n, kinds)
    sizes = [elements * (index + 1) // count - elements * index // count for index in range(count)]
    slices = []
    for tensor, (_, device) in zip(dense, present, strict=True):
        with tf.device(device):
            slices.append(tf.split(tf.reshape(tensor, [-1]), sizes))
    return _summed_slices(devices, slices, lambda sums: tf.reshape(tf.concat(sums, 0), dense[0].shape), kinds)


def summed_over_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], rows: Any, *, kind: str) -> list[Any]:
    """Returns for each device of a stage the sum of all tensors.

    With two devices, or an axis of features that is not divisible, each sends its tensor to all others.

    Args:
        tensors: By device, of equal shapes.
        devices: Their full names.
        rows: The size of the first axis if it is not static.
        kind: As what the transfers are recorded.
    """
    ways, width = len(devices), tensors[0].shape[-1] if tensors[0].shape.rank else None
    if ways == 2 or width is None or width % ways:
        return _for_each(devices, tensors, tf.add_n, [kind], rows)
    slices = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            slices.append(tf.split(tensor, ways, -1))
    return _summed_slices(devices, slices, lambda sums: tf.concat(sums, -1), [kind], rows)


def gathered_from_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], rows: Any, *, kind: str) -> list[Any]:
    """Returns for each device the tensors of all, stacked along a new first axis. Arguments: `summed_over_shards`."""
    return _for_each(devices, tensors, tf.stack, [kind], rows)


def gathered_from_columns(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns for each column the tensors of all columns, one after another along axis 0."""
    return _for_each(devices, tensors, lambda sent: tf.concat(sent, 0), [WEIGHT_GRADIENT])


def exchanged_slices(slices: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
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
    return _for_slices(devices, sent, tf.stack, [WEIGHT_GRADIENT])


def _summed_slices(
    devices: Sequence[str],
    slices: Sequence[Sequence[tf.Tensor]],
    joined: Callable[..., tf.Tensor],
    kinds: Sequence[str],
    rows: Any = None,
) -> list[tf.Tensor]:
    """Each device adds one slice of all tensors and sends the sum to the others: 2 (K - 1) / K of the size."""
    return _for_each(devices, _for_slices(devices, slices, tf.add_n, kinds, rows), joined, kinds, rows)


def _for_slices(
    devices: Sequence[str],
    slices: Sequence[Sequence[tf.Tensor]],
    combined: Callable[..., tf.Tensor],
    kinds: Sequence[str],
    rows: Any = None,
) -> list[tf.Tensor]:
    """Sends slice `i` of each device to device `i`, and returns what `combined` makes of them there."""
    results: list[tf.Tensor] = []
    for index, device in enumerate(devices):
        results += _for_each([device], [of_device[index] for of_device in slices], combined, kinds, rows)
    return results


def _for_each(
    devices: Sequence[str], sent: Sequence[Any], combined: Callable[..., Any], kinds: Sequence[str], rows: Any = None
) -> list[Any]:
    """Sends tensors to each device, and returns what `combined` makes of them there."""
    results = []
    for device in devices:
        for kind in kinds:
            record_transfer(kind, sent, device, rows=rows)
        with tf.device(device):
            results.append(combined(list(sent)))
    return results


def _joined_rows(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    values, indices = (tf.concat([getattr(one, name) for one in slices], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)
