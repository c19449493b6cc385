"""Sums of sparse gradients (`tf.IndexedSlices`) over a group, without making them dense."""

import tensorflow as tf

from tfdist.collectives.group import Group


def sum_duplicate_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of `slices` that have one index, so that every index stands once.

    Norms and squares of a sparse gradient are those of the dense one only then: Keras takes `(a² + b²)` for
    `(a + b)²` where an id occurs twice.

    >>> import tensorflow as tf
    >>> slices = tf.IndexedSlices(tf.constant([[1.], [2.], [4.]]), tf.constant([7, 3, 7]), tf.constant([9, 1]))
    >>> summed = sum_duplicate_rows(slices)
    >>> summed.indices.numpy().tolist(), summed.values.numpy().tolist()
    ([7, 3], [[5.0], [2.0]])
    """
    indices, positions = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def sum_indexed_slices(slices: tf.IndexedSlices, group: Group) -> tf.IndexedSlices:
    """Sums `slices` over the group; the replicas may have different numbers of rows.

    Args:
      slices: `values` of shape `[rows, ...]` and any floating dtype, `indices` of shape `[rows]`.
      group: the replicas that take part.

    Returns:
      The sum, every index once.
    """
    if group.size == 1:
        return sum_duplicate_rows(slices)
    slices = sum_duplicate_rows(slices)
    rows = group.gather(tf.shape(slices.indices))
    longest = tf.reduce_max(rows)
    padding = longest - tf.shape(slices.indices)[0]
    indices = group.gather(tf.pad(slices.indices, [[0, padding]]))
    values = group.gather(tf.pad(slices.values, [[0, padding]] + [[0, 0]] * (slices.values.shape.rank - 1)))
    present = tf.reshape(tf.sequence_mask(rows, longest), [-1])
    kept = tf.IndexedSlices(tf.boolean_mask(values, present), tf.boolean_mask(indices, present), slices.dense_shape)
    return sum_duplicate_rows(kept)
