"""Counts the collectives that one replica executes, and their bytes, where they execute: in the graph."""

from dataclasses import dataclass

import tensorflow as tf

from tfdist.tensorflow_internals.symbols import ResourceVariable

GRADIENTS = "gradients"
OTHER = "other"


@dataclass(frozen=True)
class TrafficCount:
    """What a replica has handed to collectives so far.

    Attributes:
      gradient_collectives: how many collectives carried gradients.
      gradient_bytes: the size of the tensors given to them. A ring all-reduce over N replicas sends `2 (N - 1) / N`
        times that (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms").
      other_collectives: how many carried anything else (sample counts, metrics, batch statistics, predictions).
      other_bytes: the size of the tensors given to those.
    """

    gradient_collectives: int
    gradient_bytes: int
    other_collectives: int
    other_bytes: int

    def __sub__(self, earlier: "TrafficCount") -> "TrafficCount":
        """What came after `earlier`.

        >>> TrafficCount(3, 300, 5, 50) - TrafficCount(1, 100, 5, 50)
        TrafficCount(gradient_collectives=2, gradient_bytes=200, other_collectives=0, other_bytes=0)
        """
        return TrafficCount(
            self.gradient_collectives - earlier.gradient_collectives,
            self.gradient_bytes - earlier.gradient_bytes,
            self.other_collectives - earlier.other_collectives,
            self.other_bytes - earlier.other_bytes,
        )


class Traffic:
    """Counters in the host memory of a worker: exact also in conditions and loops, as they count executions."""

    def __init__(self, host: str) -> None:
        """Makes the counters on `host`, the CPU device of a worker."""
        self._host = host
        with tf.init_scope(), tf.device(host):
            self._counters = {
                kind: ResourceVariable([0, 0], dtype=tf.int64, trainable=False, name=f"{kind}_traffic")
                for kind in (GRADIENTS, OTHER)
            }

    def add(self, kind: str, tensor: tf.Tensor) -> None:
        """Counts one collective over `tensor`."""
        elements = tensor.shape.num_elements()
        with tf.device(self._host):
            if elements is None:
                elements = tf.size(tensor, out_type=tf.int64)
            nbytes = elements * tensor.dtype.size
            self._counters[kind].assign_add(tf.stack([tf.constant(1, tf.int64), tf.cast(nbytes, tf.int64)]))

    def count(self) -> TrafficCount:
        """What was counted since the start. To be called eagerly."""
        gradients, other = (self._counters[kind].numpy().tolist() for kind in (GRADIENTS, OTHER))
        return TrafficCount(*gradients, *other)
