"""The compressed reduction of one replica: chooses compressors, fills buckets, reduces, updates compression states."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets
from tfdist.collectives.byte_counters import OTHER, ByteCounters
from tfdist.collectives.compression_state import ReplicaState
from tfdist.collectives.exchange_timer import begin_bucket, end_bucket
from tfdist.collectives.sparse_all_reduce import sum_encoded_slices, sum_indexed_slices
from tfdist.compression import Compressor, Dense, Group, Policy
from tfdist.compression.compressor import Reduced, State
from tfdist.compression.gradient_tensors import with_values
from tfdist.compression.owned_parts import OwnedParts
from tfdist.compression.wrappers import Wrapper

ENCODED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


class CompressedReduction:
    """Sums gradients over a group. The policy chooses the compressor of each variable."""

    def __init__(
        self,
        policy: Policy,
        state: ReplicaState,
        counters: ByteCounters,
        bucket_bytes: int,
        group: Callable[[str], Group],
    ) -> None:
        """Reduces by `policy`, over the `group` of a label of the counters."""
        self._policy = policy
        self._state = state
        self._counters = counters
        self._bucket_bytes = bucket_bytes
        self._group = group
        self._writes: list[tuple[tf.Variable, tf.Tensor, tf.Tensor | None]] = []  # new values, and of which rows
        self._finite: list[tf.Tensor] = []

    def __call__(self, gradients: Sequence[Any], paths: Sequence[str], parts: OwnedParts | None = None) -> list[Any]:
        """Returns the sums of `gradients`, dense floating tensors or `tf.IndexedSlices`, one for each path.

        With `parts`, those of dense gradients are the sums of the values that this replica owns, flat. If a gradient
        of any replica holds NaN or Inf, the compression states do not change: the update will be skipped, or the
        training is lost.
        """
        self._writes, self._finite = [], []
        results: list[Any] = [None] * len(gradients)
        by_compressor: dict[Compressor, list[int]] = {}
        for position, gradient in enumerate(gradients):
            if parts is not None and gradient.shape.num_elements() == 0:
                results[position] = tf.zeros([0], gradient.dtype)  # no replica has a part to send
            elif not isinstance(gradient, tf.IndexedSlices):
                can_be_encoded = gradient.dtype in ENCODED_DTYPES and gradient.shape.num_elements() is not None
                compressor: Compressor = Dense()
                if can_be_encoded:
                    compressor, _ = self._policy.resolve(paths[position], gradient.shape)
                by_compressor.setdefault(compressor, []).append(position)
        buckets = [
            (compressor, [positions[index] for index in bucket])
            for compressor, positions in by_compressor.items()
            for bucket in fill_buckets(
                [gradients[position] for position in positions],
                self._bucket_bytes,
                packs_large=_sends_little(compressor),
            )
        ]
        # A bucket is ready when its first variable's gradient is, which backpropagation computes last.
        for compressor, positions in sorted(buckets, key=lambda bucket: -min(bucket[1])):
            members = [gradients[position] for position in positions]
            group, members = begin_bucket(self._group(method_label(compressor)), members)
            parts_of_bucket = None if parts is None else parts.of(positions)
            member_paths = [paths[position] for position in positions]
            sums = end_bucket(group, self._reduce(compressor, members, member_paths, group, parts_of_bucket))
            for position, summed in zip(positions, sums, strict=True):
                results[position] = summed
        for position, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                results[position] = self._reduce_rows(gradient, paths[position])
        if self._writes:
            finite = tf.reduce_all(self._finite)
            if parts is not None:  # `finite` is about the values that this replica owns.
                overflows = tf.cast(tf.logical_not(finite), tf.int32)
                finite = tf.equal(self._group(OTHER).sum(overflows), 0)
            tf.cond(finite, self._write, lambda: None)
        return results

    def _reduce(
        self,
        compressor: Compressor,
        gradients: Sequence[tf.Tensor],
        paths: list[str],
        group: Group,
        parts: OwnedParts | None,
    ) -> list[tf.Tensor]:
        label = method_label(compressor)
        self._counters.add_dense_sum(label, gradients, group)
        for gradient, path in zip(gradients, paths, strict=True):
            self._counters.record_size(label, path, gradient.shape)
        if compressor == Dense():
            none: list[State | None] = [None] * len(gradients)
            reduced = _sums_of_parts(compressor, gradients, group, none, parts)
            self._finite.append(reduced.finite)
            return reduced.sums
        variables = [
            self._state.of(path, compressor, gradient.shape) if self._policy.resolve(path, gradient.shape)[1] else None
            for path, gradient in zip(paths, gradients, strict=True)
        ]
        states = [None if entries is None else _read(entries) for entries in variables]
        as_float = [tf.cast(gradient, tf.float32) for gradient in gradients]
        reduced = _sums_of_parts(compressor, as_float, group, states, parts)
        for entries, new_state in zip(variables, reduced.states, strict=True):
            self._writes += [(entries[name], value, None) for name, value in new_state.items()] if entries else []
        self._finite.append(reduced.finite)
        return [tf.cast(summed, gradient.dtype) for summed, gradient in zip(reduced.sums, gradients, strict=True)]

    def _reduce_rows(self, slices: tf.IndexedSlices, path: str) -> tf.IndexedSlices:
        static = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
        shape: list[int] | None = None if static is None else static.tolist()
        compressor, has_state = (Dense(), False) if shape is None else self._policy.resolve(path, shape)
        if not has_state or not compressor.encodes_rows:
            compressor = Dense()
        label = method_label(compressor)
        group, (values,) = begin_bucket(self._group(label), [slices.values])
        self._counters.record_size(label, path, slices.shape)
        self._counters.add_dense(label, [slices.values, slices.indices], group.size - 1)
        if shape is None or compressor == Dense():
            summed = sum_indexed_slices(with_values(slices, values), group)
            summed = with_values(summed, *end_bucket(group, [summed.values]))
            self._finite.append(tf.reduce_all(tf.math.is_finite(summed.values)))
            return summed
        entries = self._state.of(path, compressor, shape)
        as_float = with_values(slices, tf.cast(values, tf.float32))
        summed, new_state, rows, finite = sum_encoded_slices(as_float, compressor, group, _read(entries))
        summed = with_values(summed, *end_bucket(group, [summed.values]))
        for name, value in new_state.items():
            self._writes.append((entries[name], value, rows if value.shape.rank else None))
        self._finite.append(finite)
        return tf.IndexedSlices(tf.cast(summed.values, slices.values.dtype), summed.indices, slices.dense_shape)

    def _write(self) -> None:
        for variable, value, rows in self._writes:
            if rows is None:
                variable.assign(value)
            else:
                variable.scatter_update(tf.IndexedSlices(value, rows))


def _sums_of_parts(
    compressor: Compressor,
    gradients: Sequence[tf.Tensor],
    group: Group,
    states: Sequence[State | None],
    parts: OwnedParts | None,
) -> Reduced:
    """Sums everywhere, or where `parts` are owned if that sends less, which it does not for very unequal lengths."""
    if parts is None:
        return compressor.reduce(gradients, group, states)
    if parts.is_balanced:
        return compressor.reduce_parts(gradients, group, states, parts)
    return Compressor.reduce_parts(compressor, gradients, group, states, parts)


def _sends_little(compressor: Compressor) -> bool:
    """Whether a compressor sends less than 16 bits a value: joining payloads then costs less than further rounds."""
    return compressor.payload_bytes((1024, 1024)) < 2 * 1024**2


def method_label(compressor: Compressor) -> str:
    """Returns the label under which a compressor is counted: its representation without wrappers."""
    while isinstance(compressor, Wrapper):
        compressor = compressor.compressor
    return "uncompressed" if compressor == Dense() else repr(compressor)


def _read(entries: dict[str, tf.Variable]) -> dict[str, tf.Tensor]:
    return {name: tf.convert_to_tensor(variable) for name, variable in entries.items()}
