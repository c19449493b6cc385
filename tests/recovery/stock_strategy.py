"""TensorFlow's own MirroredStrategy, of which several would disturb each other, and one that passes for a TPU's."""

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


class FakeTPUStrategy(tf.distribute.TPUStrategy):
    """Is a TPUStrategy for whoever asks, and trains on one CPU."""

    def __init__(self):
        extended = type(tf.distribute.OneDeviceStrategy("/cpu:0").extended)
        tf.distribute.Strategy.__init__(self, extended(self, "/cpu:0"))

    run = tf.distribute.Strategy.run
