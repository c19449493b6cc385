"""A reduction that records which collectives it calls, bucket by bucket, or that leaves gradients as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReplicaReduction
from tfdist.collectives.byte_counters import GRADIENTS
from tfdist.collectives.exchange_timer import TimedGroup
from tfdist.compression import Group

SUM, GATHER, EXCHANGE = "sum", "gather", "exchange"


@dataclass(frozen=True)
class RecordedCall:
    """A collective, as a replica calls it.

    Attributes:
        kind: `SUM`, `GATHER` or `EXCHANGE`.
        nbytes: The size of the tensor that it passes: an int, or an int64 scalar if it is not known while tracing.
        bucket: The number of the bucket.
    """

    kind: str
    nbytes: "int | tf.Tensor"
    bucket: int


@dataclass
class Recorder:
    """Keeps the calls of a step, in the order of the trace, and the number of its buckets so far."""

    calls: list[RecordedCall] = field(default_factory=list)
    buckets: int = 0

    def add(self, kind: str, tensor: tf.Tensor, more: int = 0) -> None:
        """Records a call with `tensor` and `more` further elements for the newest bucket."""
        elements = tensor.shape.num_elements()
        count = tf.size(tensor, out_type=tf.int64) if elements is None else elements
        self.calls.append(RecordedCall(kind, (count + more) * tensor.dtype.size, max(self.buckets - 1, 0)))


class _RecordedGroup(TimedGroup):
    """A group whose calls are recorded. `begin_bucket` marks where buckets begin, as for a timed group."""

    def __init__(self, group: Group, recorder: Recorder) -> None:
        self._group, self._recorder = group, recorder

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        self._recorder.add(SUM, tensor)
        return self._group.sum(tensor)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        self._recorder.add(GATHER, tensor)
        return self._group.gather(tensor)

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        self._recorder.add(EXCHANGE, slices, more=self.size)  # each row is sent with the position of its receiver
        return self._group.exchange(slices)

    def exchange_rows(self, rows: tf.Tensor) -> tf.Tensor:
        self._recorder.add(EXCHANGE, rows)
        return self._group.exchange_rows(rows)

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        self._recorder.add(EXCHANGE, rows)
        return self._group.reduce_scatter(rows)

    def bucket(self, gradients: Sequence[tf.Tensor]) -> tuple[Group, list[tf.Tensor]]:
        self._recorder.buckets += 1
        return self, list(gradients)


class RecordedReduction(ReplicaReduction):
    """A reduction whose collectives go to `recorder`, if it is set when they are traced."""

    recorder: Recorder | None = None

    def _group(self, launcher: Any, label: str, options: Any) -> Group:
        group = super()._group(launcher, label, options)
        return group if self.recorder is None else _RecordedGroup(group, self.recorder)


class KeptGradients(RecordedReduction):
    """A reduction that returns gradients as they are, and counts updates. Everything else is reduced.

    Attributes:
        seen: Called with the gradients of an update and the paths of their variables, returns those to use; `None`:
            nobody asks.
    """

    seen: Callable[[Sequence[Any], Sequence[str]], Sequence[Any]] | None = None

    def __call__(self, tensors: Sequence[Any], *, mean: bool, options: Any) -> list[Any]:
        """Returns gradients unchanged, and sums of all other `tensors`."""
        if self.context.kind != GRADIENTS:
            return super().__call__(tensors, mean=mean, options=options)
        self.counters.add_update()
        if self.seen is not None:
            tensors = self.seen(tensors, list(self.context.paths or ()))
        return list(tensors)
