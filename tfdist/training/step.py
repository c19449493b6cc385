"""The step that runs on a replica: how many of the global batch's samples it has."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_current: contextvars.ContextVar["ReplicaStep | None"] = contextvars.ContextVar("tfdist_replica_step", default=None)


def current_step() -> "ReplicaStep | None":
    """The Keras step that this replica is running, if any."""
    return _current.get()


class ReplicaStep:
    """One replica's part of a Keras step.

    The gradient of a global batch is the sum of the replicas' gradients if every replica's mean loss is multiplied by
    its `fraction` of the samples; with equal parts that is Keras' `1 / N`. Micro-batches have a step each.
    """

    sum_scale = 1  # the sum over the replicas is already the sum over the global batch

    def __init__(self, samples: int | tf.Tensor, fraction: float | tf.Tensor, parts_of_replica: int = 1) -> None:
        """Describes a replica's part, or a micro-batch of it.

        Args:
          samples: this replica's number of samples, an int or an int32 scalar.
          fraction: `samples` divided by all replicas' samples, a float or a float32 scalar.
          parts_of_replica: how many micro-batches the replica computes.
        """
        self.samples = samples
        self.fraction = fraction
        self.parts_of_replica = parts_of_replica
        self.has_scaled = False

    @property
    def samples_are_static(self) -> bool:
        """Whether the number of samples is known while the step is traced."""
        return isinstance(self.samples, int)

    @property
    def contributes(self) -> bool | tf.Tensor:
        """Whether this replica has any samples."""
        return self.samples > 0

    def part(self, samples: int | tf.Tensor, parts: int) -> "ReplicaStep":
        """One of `parts` micro-batches, which has `samples` of this step's samples."""
        if isinstance(samples, int) and isinstance(self.samples, int) and isinstance(self.fraction, float):
            return ReplicaStep(samples, self.fraction * samples / max(self.samples, 1), parts)
        share = tf.math.divide_no_nan(tf.cast(samples, tf.float32), tf.cast(self.samples, tf.float32))
        return ReplicaStep(samples, self.fraction * share, parts)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes this the `current_step` of the replica."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @contextmanager
    def share_of(self, divisor: tf.Tensor) -> Iterator[None]:
        """Makes `fraction` this replica's share of the sum of all replicas' `divisor`, a float32 scalar."""
        divisor = tf.stop_gradient(divisor)
        of_samples = self.fraction
        self.fraction = tf.math.divide_no_nan(divisor, sum_over_replicas(divisor))
        try:
            yield
        finally:
            self.fraction = of_samples


def sum_over_replicas(tensor: tf.Tensor) -> tf.Tensor:
    """The exact sum of a tensor of all replicas, in a replica context."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensor)


def static_samples(value: Any) -> int | None:
    """The number of samples of an input if it is known while tracing."""
    shape = getattr(value, "shape", None)
    return None if shape is None or getattr(shape, "rank", 1) is None or len(shape) == 0 else shape[0]


def count_samples(value: Any) -> tf.Tensor:
    """The number of samples of an input (dense, ragged or sparse), an int32 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0]
