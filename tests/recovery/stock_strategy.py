"""TensorFlow's own MirroredStrategy, several of which would disturb each other in one process."""

import itertools

import tensorflow as tf

_FIRST_KEY = 1 << 28  # far above those of tfdist's strategies
_made = itertools.count()


def stock_mirrored(devices):
    """A stock strategy whose collectives have numbers of their own.

    All of TensorFlow's begin at 0: the second one of a process fails with "Shape mismatch in the collective instance",
    and so does every collective after that. TensorFlow's tests use this attribute, too.
    """
    own_keys = {"_collective_key_base": _FIRST_KEY + 1000 * next(_made)}
    return type("MirroredStrategy", (tf.distribute.MirroredStrategy,), own_keys)(devices)
