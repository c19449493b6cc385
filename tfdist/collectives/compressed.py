"""The compressed reduction of one replica: chooses, packs, reduces, and keeps what must be remembered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.collectives.buckets import fill_buckets
from tfdist.collectives.sparse import sum_encoded_slices, sum_indexed_slices
from tfdist.collectives.state import ReplicaState
from tfdist.collectives.stopwatch import finished, started
from tfdist.collectives.traffic import Traffic
from tfdist.compression import Compressor, Dense, ErrorFeedback, Group, MomentumCorrection, Policy, WarmUp

_ENCODED_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


@dataclass(frozen=True)
class _Write:
    """A new value of a variable, or of those of its rows that `rows` names."""

    variable: tf.Variable
    value: tf.Tensor
    rows: tf.Tensor | None = None

    def make(self) -> None:
        if self.rows is None:
            self.variable.assign(self.value)
        else:
            self.variable.scatter_update(tf.IndexedSlices(self.value, self.rows))


class CompressedReduction:
    """Sums gradients over a group, each variable's as the policy says."""

    def __init__(
        self,
        policy: Policy,
        state: ReplicaState,
        traffic: Traffic,
        bucket_bytes: int,
        group: Callable[[str], Group],
    ) -> None:
        """Reduces by `policy`.

        Args:
          policy: chooses the compressors.
          state: holds what they remember.
          traffic: counts what an uncompressed exchange would have sent.
          bucket_bytes: see `fill_buckets`.
          group: called with a label for the counters, returns the group to reduce over.
        """
        self._policy = policy
        self._state = state
        self._traffic = traffic
        self._bucket_bytes = bucket_bytes
        self._group = group
        self._writes: list[_Write] = []
        self._finite: list[tf.Tensor] = []

    def __call__(self, gradients: Sequence[Any], paths: Sequence[str]) -> list[Any]:
        """The sums of `gradients`, one for each path of a variable: dense floating tensors or `tf.IndexedSlices`.

        If a gradient of any replica holds NaN or Inf, nothing is remembered of this reduction: the update will be
        skipped, or the training is lost.
        """
        self._writes, self._finite = [], []
        results: list[Any] = [None] * len(gradients)
        by_compressor: dict[Compressor, list[int]] = {}
        for position, gradient in enumerate(gradients):
            if not isinstance(gradient, tf.IndexedSlices):
                can_be_encoded = gradient.dtype in _ENCODED_DTYPES and gradient.shape.num_elements() is not None
                compressor: Compressor = Dense()
                if can_be_encoded:
                    compressor, _ = self._policy.compressor_of(paths[position], gradient.shape)
                by_compressor.setdefault(compressor, []).append(position)
        buckets = [
            (compressor, [positions[index] for index in bucket.positions])
            for compressor, positions in by_compressor.items()
            for bucket in fill_buckets([gradients[position] for position in positions], self._bucket_bytes)
        ]
        # A bucket is ready when its first variable's gradient is, which backpropagation makes last.
        for compressor, positions in sorted(buckets, key=lambda bucket: -min(bucket[1])):
            members = [gradients[position] for position in positions]
            group = started(self._group(label_of(compressor)), members)
            sums = self._reduce(compressor, members, [paths[position] for position in positions], group)
            finished(group, sums)
            for position, summed in zip(positions, sums, strict=True):
                results[position] = summed
        for position, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                results[position] = self._reduce_rows(gradient, paths[position])
        if self._writes:
            tf.cond(tf.reduce_all(self._finite), self._write, lambda: None)
        return results

    def _reduce(
        self, compressor: Compressor, gradients: list[tf.Tensor], paths: list[str], group: Group
    ) -> list[tf.Tensor]:
        self._count_dense(compressor, gradients, paths, group)
        if compressor == Dense():
            reduced = compressor.reduce(gradients, group, [None] * len(gradients))
            self._finite.append(reduced.finite)
            return reduced.sums
        variables = [
            self._state.of(path, compressor, gradient.shape)
            if self._policy.compressor_of(path, gradient.shape)[1]
            else None
            for path, gradient in zip(paths, gradients, strict=True)
        ]
        states = [None if entries is None else _read(entries) for entries in variables]
        reduced = compressor.reduce([tf.cast(gradient, tf.float32) for gradient in gradients], group, states)
        for entries, new_state in zip(variables, reduced.states, strict=True):
            self._writes += [_Write(entries[name], value) for name, value in new_state.items()] if entries else []
        self._finite.append(reduced.finite)
        return [tf.cast(summed, gradient.dtype) for summed, gradient in zip(reduced.sums, gradients, strict=True)]

    def _reduce_rows(self, slices: tf.IndexedSlices, path: str) -> tf.IndexedSlices:
        static = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
        shape: list[int] | None = None if static is None else static.tolist()
        compressor, has_state = (Dense(), False) if shape is None else self._policy.compressor_of(path, shape)
        if shape is None or not has_state or not compressor.encodes_rows:
            group = started(self._group(label_of(Dense())), [slices.values])
            self._count_dense_rows(Dense(), slices, path, group)
            summed = sum_indexed_slices(slices, group)
            finished(group, [summed.values])
            self._finite.append(tf.reduce_all(tf.math.is_finite(summed.values)))
            return summed
        group = started(self._group(label_of(compressor)), [slices.values])
        self._count_dense_rows(compressor, slices, path, group)
        entries = self._state.of(path, compressor, shape)
        as_float = tf.IndexedSlices(tf.cast(slices.values, tf.float32), slices.indices, slices.dense_shape)
        summed, new_state, rows, finite = sum_encoded_slices(as_float, compressor, group, _read(entries))
        finished(group, [summed.values])
        for name, value in new_state.items():
            self._writes.append(_Write(entries[name], value, rows if value.shape.rank else None))
        self._finite.append(finite)
        return tf.IndexedSlices(tf.cast(summed.values, slices.values.dtype), summed.indices, slices.dense_shape)

    def _write(self) -> None:
        for write in self._writes:
            write.make()

    def _count_dense(
        self, compressor: Compressor, gradients: Sequence[tf.Tensor], paths: Sequence[str], group: Group
    ) -> None:
        self._traffic.add_dense(label_of(compressor), gradients, 2 * (group.size - 1) / group.size)
        for gradient, path in zip(gradients, paths, strict=True):
            self._traffic.note(label_of(compressor), path, gradient.shape)

    def _count_dense_rows(self, compressor: Compressor, slices: tf.IndexedSlices, path: str, group: Group) -> None:
        self._traffic.note(label_of(compressor), path, slices.shape)
        self._traffic.add_dense(label_of(compressor), [slices.values, slices.indices], group.size - 1)


def label_of(compressor: Compressor) -> str:
    """Under what the traffic of a compressor's variables is counted: its name without the wrappers."""
    while isinstance(compressor, ErrorFeedback | MomentumCorrection | WarmUp):
        compressor = compressor.compressor
    return "uncompressed" if compressor == Dense() else repr(compressor)


def _read(entries: dict[str, tf.Variable]) -> dict[str, tf.Tensor]:
    return {name: tf.convert_to_tensor(variable) for name, variable in entries.items()}
