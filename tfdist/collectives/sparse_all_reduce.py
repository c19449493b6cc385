"""Sums sparse gradients (`tf.IndexedSlices`) over a group without converting them to dense tensors."""

from collections.abc import Mapping

import tensorflow as tf

from tfdist.compression import Compressor, Group, WarmUp
from tfdist.compression.gradient_tensors import sum_duplicate_rows


def sum_indexed_slices(slices: tf.IndexedSlices, group: Group) -> tf.IndexedSlices:
    """Sums `slices`, of any floating dtype, over the group; each index of the sum occurs once.

    The replicas may have different numbers of rows.
    """
    slices = sum_duplicate_rows(slices)
    if group.size == 1:
        return slices
    rows = group.gather(tf.shape(slices.indices))
    longest = tf.reduce_max(rows)
    values = group.gather(_padded(slices.values, longest))
    return _of_present_rows(values, slices, rows, longest, group)


def sum_encoded_slices(
    slices: tf.IndexedSlices, compressor: Compressor, group: Group, state: Mapping[str, tf.Tensor]
) -> tuple[tf.IndexedSlices, dict[str, tf.Tensor], tf.Tensor, tf.Tensor]:
    """Sums `slices` over the group; `compressor` encodes their rows.

    The compression state of rows that are not in `slices` does not change.

    These have float32 `values` of shape `[rows, ...]`. `state` is that of the complete variable.

    Returns:
        The sum, in which each index occurs once; the new state, of which entries of the variable's shape hold the
        replica's own rows only; the indices of those rows; and whether all values are finite.
    """
    slices = sum_duplicate_rows(slices)
    own_indices = slices.indices
    rows = group.gather(tf.shape(own_indices))
    longest = tf.reduce_max(rows)
    gradient = _padded(slices.values, longest)
    row_state = {
        name: _padded(tf.gather(value, own_indices), longest) if value.shape.rank else value
        for name, value in state.items()
    }

    def exchanged(by: Compressor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        payload, new_state = by.encode(gradient, row_state)
        shape = tf.shape(gradient)
        received = {
            name: tf.reshape(group.gather(part), tf.concat([[group.size], tf.shape(part)], axis=0))
            for name, part in payload.items()
        }
        decoded = [
            by.decode({name: part[replica] for name, part in received.items()}, shape) for replica in range(group.size)
        ]
        return tf.concat(decoded, axis=0), [tf.identity(new_state.get(name, row_state[name])) for name in row_state]

    if isinstance(compressor, WarmUp):
        values, entries = tf.cond(
            row_state["warm_up_steps"] < compressor.steps,
            lambda: exchanged(compressor.uncompressed()),
            lambda: exchanged(compressor),
        )
    else:
        values, entries = exchanged(compressor)
    new_state = {
        name: entry[: tf.size(own_indices)] if entry.shape.rank else entry
        for name, entry in zip(row_state, entries, strict=True)
    }
    finite = tf.reduce_all(tf.math.is_finite(values))
    return _of_present_rows(values, slices, rows, longest, group), new_state, own_indices, finite


def _padded(values: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    return tf.pad(values, [[0, rows - tf.shape(values)[0]]] + [[0, 0]] * (values.shape.rank - 1))


def _of_present_rows(
    values: tf.Tensor, slices: tf.IndexedSlices, rows: tf.Tensor, longest: tf.Tensor, group: Group
) -> tf.IndexedSlices:
    """Sums all replicas' `values`, `[size * longest, ...]`, without the padding after each replica's first `rows`."""
    indices = group.gather(_padded(slices.indices, longest))
    present = tf.reshape(tf.sequence_mask(rows, longest), [-1])
    present_rows = tf.IndexedSlices(
        tf.boolean_mask(values, present), tf.boolean_mask(indices, present), slices.dense_shape
    )
    return sum_duplicate_rows(present_rows)
