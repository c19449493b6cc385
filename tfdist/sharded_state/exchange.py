"""Exchanges the units of a layout: each replica gets the sums of its part, and later the new values of all parts."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfdist.collectives.exchange_timer import begin_bucket, end_bucket
from tfdist.compression import Group
from tfdist.compression.gradient_tensors import flatten, zeros_unless
from tfdist.sharded_state.layout import SpanLayout, Unit
from tfdist.tensorflow_internals.sent_dtypes import from_words, to_words

Tensors = Mapping[int, tf.Tensor]


def reduce_scatter(
    layout: SpanLayout,
    unit: Unit,
    gradients: Tensors,
    group: Group,
    replicas: Sequence[int],
    replica: int,
    contributes: tf.Tensor | None = None,
) -> dict[int, tf.Tensor]:
    """Sums gradients over the group; a replica gets the part that it owns.

    A replica of N sends `(N - 1) / N` of the gradients. Where the group has no reduce-scatter, as between CPUs of a
    process, it takes its part of the whole sum.

    Args:
        layout: Who owns what.
        unit: The unit of the gradients.
        gradients: The replica's dense gradients by position: those of the unit, or some of them.
        group: All replicas.
        replicas: The number of the replica at each position of the group.
        replica: The number of this replica.
        contributes: Bool scalar; if it is false, zeros are sent. `None` counts as true.

    Returns:
        The sums of this replica's spans that are not empty, flat, by position.
    """
    present = [position for position in unit.positions if position in gradients]
    if not present:
        return {}
    timed, members = begin_bucket(group, [gradients[position] for position in present])
    dtype = members[0].dtype
    sizes = [layout.sizes[position] for position in present]
    if not timed.adds_rows or _is_sum_shorter(layout, unit, present):
        (vector,) = end_bucket(timed, [timed.sum(zeros_unless(contributes, flatten(members)))])
        vectors = dict(zip(present, tf.split(vector, sizes), strict=True))
        spans = {present_position: layout.spans(present_position)[replica] for present_position in present}
        return {
            present_position: vectors[present_position][span.start : span.stop]
            for present_position, span in spans.items()
            if span.size
        }
    is_complete = unit.is_divided and len(present) == len(unit.positions)
    if is_complete:
        length = unit.part_length
        missing = layout.replicas * length - sum(sizes)  # `flatten` adds the padding: one copy, or none.
        padded = [*members, tf.zeros([missing], dtype)] if missing else members
        rows = tf.reshape(zeros_unless(contributes, flatten(padded)), [layout.replicas, length])
        if list(replicas) != list(range(layout.replicas)):
            rows = tf.gather(rows, list(replicas))
    else:
        length = _longest(layout, present)
        flat = zeros_unless(contributes, flatten(members))
        vectors = dict(zip(present, tf.split(flat, sizes), strict=True))
        rows = tf.stack([_padded(_part(layout, vectors, present, owner), length) for owner in replicas])
    (total,) = end_bucket(timed, [timed.reduce_scatter(rows)])
    return _split(layout, total, present, replica)


def all_gather(
    layout: SpanLayout, unit: Unit, parts: Tensors, positions: Sequence[int], group: Group, replicas: Sequence[int],
    dtype: tf.DType,
) -> dict[int, tf.Tensor]:  # fmt: skip
    """Gathers the parts of variables. A replica of N sends `(N - 1) / N` of the variables.

    Args:
        layout: Who owns what.
        unit: The unit of the variables.
        parts: The values of this replica's spans that are not empty, flat, by position.
        positions: The positions of the variables that are gathered, in the order of the unit, equal on all replicas.
        group: All replicas.
        replicas: The number of the replica at each position of the group.
        dtype: The dtype of the variables.

    Returns:
        The variables, flat, by position.
    """
    if _is_sum_shorter(layout, unit, positions):
        return _sum_of_words(layout, parts, positions, group, dtype)
    own_parts = [parts[position] for position in positions if position in parts]
    is_complete = unit.is_divided and len(positions) == len(unit.positions)
    length = unit.part_length if is_complete else _longest(layout, positions)
    row = _padded(flatten(own_parts) if own_parts else tf.zeros([0], dtype), length)
    timed, (row,) = begin_bucket(group, [row])
    gathered = timed.gather(to_words(row[tf.newaxis]))
    (rows,) = end_bucket(timed, [from_words(gathered, dtype, layout.replicas, length)])
    sizes = [layout.sizes[position] for position in positions]
    if is_complete:
        if list(replicas) != list(range(layout.replicas)):
            rows = tf.gather(rows, [list(replicas).index(owner) for owner in range(layout.replicas)])
        vector, missing = tf.reshape(rows, [-1]), layout.replicas * length - sum(sizes)
        if len(sizes) == 1 and not missing:
            return {positions[0]: vector}
        vectors = tf.split(vector, [*sizes, missing])
        return dict(zip(positions, vectors, strict=False))
    parts_by_position: dict[int, list[tf.Tensor]] = {position: [] for position in positions}
    for owner in range(layout.replicas):
        split = _split(layout, rows[list(replicas).index(owner)], positions, owner)
        for position, part in split.items():
            parts_by_position[position].append(part)
    return {position: flatten(of_owners) for position, of_owners in parts_by_position.items()}


def own_part(
    layout: SpanLayout, position: int, replica: int, gradient: tf.Tensor | tf.IndexedSlices, rows: int | None
) -> tf.Tensor:
    """Returns the values of the span of `replica` of a whole gradient, flat.

    Args:
        layout: Who owns what.
        position: The position of the variable.
        replica: The number of the replica.
        gradient: Dense, or `tf.IndexedSlices`.
        rows: The first dimension of the variable; `None` if it is a scalar.
    """
    span = layout.spans(position)[replica]
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.reshape(gradient, [-1])[span.start : span.stop]
    row = layout.sizes[position] // (rows or 1)
    first, last = span.start // row, -(-span.stop // row)
    is_own = (gradient.indices >= first) & (gradient.indices < last)
    values = tf.reshape(tf.boolean_mask(gradient.values, is_own), [-1, row])
    rows = tf.boolean_mask(gradient.indices, is_own) - first
    dense = tf.reshape(tf.math.unsorted_segment_sum(values, rows, last - first), [-1])
    return tf.ensure_shape(dense[span.start - first * row : span.stop - first * row], [span.size])


def _is_sum_shorter(layout: SpanLayout, unit: Unit, positions: Sequence[int]) -> bool:
    """Whether an all-reduce sends less than parts of whole variables, which are filled up to the longest one."""
    # Of N replicas, each sends 2 (N - 1) / N of the total, or N - 1 parts of the longest one's length.
    total = sum(layout.sizes[position] for position in positions)
    return not unit.is_divided and layout.replicas * _longest(layout, positions) > 2 * total


def _sum_of_words(
    layout: SpanLayout, parts: Tensors, positions: Sequence[int], group: Group, dtype: tf.DType
) -> dict[int, tf.Tensor]:
    """Gathers whole variables by a sum of their bits, in which a replica sends zeros for those that it does not own."""
    sizes = [layout.sizes[position] for position in positions]
    own_or_zeros = [
        tf.reshape(parts[position], [-1]) if position in parts else tf.zeros([size], dtype)
        for position, size in zip(positions, sizes, strict=True)
    ]
    timed, members = begin_bucket(group, own_or_zeros)
    words = timed.sum(to_words(flatten(members)[tf.newaxis])[0])
    (vector,) = end_bucket(timed, [from_words(words[tf.newaxis], dtype, 1, sum(sizes))[0]])
    return dict(zip(positions, tf.split(vector, sizes), strict=True))


def _longest(layout: SpanLayout, positions: Sequence[int]) -> int:
    return max(
        sum(layout.spans(position)[replica].size for position in positions) for replica in range(layout.replicas)
    )


def _part(layout: SpanLayout, vectors: Tensors, positions: Sequence[int], replica: int) -> tf.Tensor:
    spans = [(vectors[position], layout.spans(position)[replica]) for position in positions]
    return flatten([vector[span.start : span.stop] for vector, span in spans])


def _split(layout: SpanLayout, row: tf.Tensor, positions: Sequence[int], replica: int) -> dict[int, tf.Tensor]:
    """Splits the part of `replica` into its spans."""
    span_values, start = {}, 0
    for position in positions:
        size = layout.spans(position)[replica].size
        if size:
            span_values[position] = row[start : start + size]
            start += size
    return span_values


def _padded(vector: tf.Tensor, length: int) -> tf.Tensor:
    missing = length - int(vector.shape[0])
    return tf.pad(vector, [[0, missing]]) if missing else vector
