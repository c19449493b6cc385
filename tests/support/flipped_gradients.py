"""A layer whose backward pass is wrong on some devices, as on a broken core."""

import keras
import tensorflow as tf


class FlippedGradients(keras.layers.Layer):
    """Passes float32 inputs on, and flips a bit of each value's exponent in the backward pass.

    Args:
        is_wrong: Takes the name of a device. It is asked outside of graphs only, so that the weights stay right.
    """

    def __init__(self, is_wrong):
        super().__init__()
        self._is_wrong = is_wrong

    def call(self, inputs):
        """Passes the inputs on."""

        @tf.custom_gradient
        def identity(x):
            def backward(gradient):
                if not tf.executing_eagerly() or not self._is_wrong(gradient.device):
                    return gradient
                return tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(gradient, tf.uint32), 1 << 29), tf.float32)

            return tf.identity(x), backward

        return identity(inputs)
