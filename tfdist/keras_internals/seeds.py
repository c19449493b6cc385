"""Seeds: every replica draws other random numbers."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_STRIDE = 0x9E3779B1  # odd, so that replicas differ in many bits (Knuth's multiplicative hashing)


def install_replica_seeds(is_ours: Callable[[Any], bool], part: Callable[[], Any]) -> None:
    """Makes Keras' seed generators give each replica, under a strategy that `is_ours`, seeds of its own.

    Their state is the same on all replicas, and stays so; without this every replica would drop the same units of its
    own samples. The first replica draws what one process would.

    Args:
      is_ours: whether a strategy is one of tfdist's.
      part: the number of the replica, or of the micro-batch among those of all replicas.
    """
    draw = keras.random.SeedGenerator.next

    @functools.wraps(draw)
    def draw_for_replica(self: Any, ordered: bool = True) -> Any:
        seed = draw(self, ordered)
        if tf.distribute.in_cross_replica_context() or not is_ours(tf.distribute.get_strategy()):
            return seed
        replica = tf.cast(part(), tf.uint32)
        offset = tf.stack([replica * tf.constant(_STRIDE, tf.uint32), tf.constant(0, tf.uint32)])
        return seed + tf.cast(offset, seed.dtype)

    keras.random.SeedGenerator.next = draw_for_replica
