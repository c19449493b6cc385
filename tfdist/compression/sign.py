"""Sign compression: one bit for each value."""

import tensorflow as tf

from tfdist.compression.block_compressor import BlockCompressor
from tfdist.compression.cast import scales_of
from tfdist.compression.gradient_tensors import all_finite
from tfdist.compression.quantization import check_block_size

_SIGN_BIT = 1 << 31


class Sign(BlockCompressor):
    """Sends the signs of the values and the mean magnitude of each block.

    A value `x` of a block of `d` values is decoded to `sign(x) * ||block||_1 / d`; zeros have a sign, too. With error
    feedback (on by default), this scaled form converges as fast as SGD; signs alone may not converge (Karimireddy
    et al. 2019, "Error feedback fixes SignSGD"; Seide et al. 2014, "1-bit stochastic gradient descent").

    Payload: 0.141 bytes for each value with blocks of 256; smaller blocks are larger and more precise. Cost: three
    passes over the values to encode, two to decode.

    >>> Sign().payload_bytes((1024,))
    144
    """

    def __init__(self, block_size: int = 256) -> None:
        """Creates a compressor with blocks of `block_size` values, a multiple of 32.

        Raises:
            ValueError: `block_size` is not a positive multiple of 32.
        """
        check_block_size(block_size, 32)
        self.block_size = block_size

    @property
    def needs_error_feedback(self) -> bool:
        return True

    @property
    def block_values(self) -> int:
        return self.block_size

    @property
    def block_words(self) -> int:
        return self.block_size // 32 + 1

    def encode_blocks(self, blocks: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        signs = tf.bitcast(tf.reshape(blocks, [-1, 32, self.block_size // 32]), tf.uint32)
        # The sign is the highest bit. Shifted to 32 different places, the bits add up without overlap.
        bits = tf.bitwise.right_shift(tf.bitwise.bitwise_and(signs, _SIGN_BIT), _places())
        words = tf.bitcast(tf.reduce_sum(bits, axis=1), tf.int32)
        magnitudes = tf.abs(blocks)
        scales = tf.reduce_mean(magnitudes, axis=1, keepdims=True)
        # The sum of large finite values may overflow.
        scales = tf.cond(
            all_finite([scales]),
            lambda: tf.identity(scales),
            lambda: tf.reduce_sum(magnitudes / self.block_size, axis=1, keepdims=True),
        )
        return tf.concat([words, tf.bitcast(scales, tf.int32)], axis=1)

    def decode_blocks(self, words: tf.Tensor) -> tf.Tensor:
        signs = tf.bitwise.left_shift(tf.bitcast(words[:, tf.newaxis, :-1], tf.uint32), _places())
        return tf.reshape(_with_signs_of(signs, words[:, tf.newaxis, -1:]), [-1, self.block_size])

    def encoding_error(self, blocks: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
        return blocks - _with_signs_of(tf.bitcast(blocks, tf.uint32), words[:, -1:])

    def finiteness_probe(self, words: tf.Tensor) -> tf.Tensor:
        return scales_of(words)


def _with_signs_of(signs: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers with the magnitudes of `scales` and the signs of the uint32 `signs`."""
    scales = tf.bitcast(scales, tf.uint32)
    return tf.bitcast(tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(signs, _SIGN_BIT), scales), tf.float32)


def _places() -> tf.Tensor:
    return tf.constant([[place] for place in range(32)], tf.uint32)
