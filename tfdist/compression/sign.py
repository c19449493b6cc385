"""One bit a value."""

import tensorflow as tf

from tfdist.compression.blocks import BlockCompressor
from tfdist.compression.cast import scales_of
from tfdist.compression.quantization import check_block_size

_SIGN_BIT = 1 << 31


class Sign(BlockCompressor):
    """Sends the signs of the values, and of each block the mean magnitude.

    A value `x` of a block of `d` values is decoded to `sign(x) * ||block||_1 / d`, where zeros have a sign, too. This
    scaled form, with error feedback (on by default), converges as fast as SGD, where signs alone need not (Karimireddy
    et al. 2019, "Error feedback fixes SignSGD"; Seide et al. 2014, "1-bit stochastic gradient descent").

    Payload: 0.141 bytes a value with blocks of 256; smaller blocks send more and are nearer to the values. Cost: three
    passes over the values to encode, two to decode.

    >>> Sign().payload_bytes((1024,))
    144
    """

    def __init__(self, block_size: int = 256) -> None:
        """Encodes blocks of `block_size` values, a multiple of 32.

        Raises:
          ValueError: it is not.
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
        # The sign is the highest bit; moved to 32 different places, bits add up without meeting.
        bits = tf.bitwise.right_shift(tf.bitwise.bitwise_and(signs, _SIGN_BIT), _places())
        words = tf.bitcast(tf.reduce_sum(bits, axis=1), tf.int32)
        scales = tf.reduce_mean(tf.abs(blocks), axis=1, keepdims=True)
        return tf.concat([words, tf.bitcast(scales, tf.int32)], axis=1)

    def decode_blocks(self, words: tf.Tensor) -> tf.Tensor:
        signs = tf.bitwise.left_shift(tf.bitcast(words[:, tf.newaxis, :-1], tf.uint32), _places())
        return tf.reshape(_with_signs_of(signs, words[:, tf.newaxis, -1:]), [-1, self.block_size])

    def remainder_of(self, blocks: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
        return blocks - _with_signs_of(tf.bitcast(blocks, tf.uint32), words[:, -1:])

    def magnitudes(self, words: tf.Tensor) -> tf.Tensor:
        return scales_of(words)


def _with_signs_of(signs: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """float32 numbers of the magnitudes `scales`, given by their bits, and of the signs of the uint32 `signs`."""
    scales = tf.bitcast(scales, tf.uint32)
    return tf.bitcast(tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(signs, _SIGN_BIT), scales), tf.float32)


def _places() -> tf.Tensor:
    return tf.constant([[place] for place in range(32)], tf.uint32)
