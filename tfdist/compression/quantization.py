"""Quantization to integers of 8 and 4 bits, and to signs: one bit for each value."""

import tensorflow as tf

from tfdist.compression.block_compressor import BlockCompressor
from tfdist.compression.cast import codes_and_scales, scale_blocks, scales_of, words_with_scales
from tfdist.compression.gradient_tensors import all_finite

_SIGN_BIT = 1 << 31


class Quantize(BlockCompressor):
    """Rounds the values of each block to equidistant levels.

    With `L = 127` (8 bits) or `7` (4 bits) and the scale `s = max |x| / L` of a block, a value is sent as the integer
    `round(x / s)`. The error of a value is at most `s / 2`; error feedback is on by default. With `stochastic=True` the
    integer is `floor(x / s + u)` with `u` uniform in [0, 1): unbiased, with an error below `s`, so that no error
    feedback is needed (Alistarh et al. 2017, "QSGD"; the blocks are its buckets, with the maximum norm).

    Payload: 1.016 or 0.516 bytes for each value with blocks of 256. Cost: three passes over the values to encode, one
    to decode; random numbers make encoding several times as costly.

    >>> Quantize(8).payload_bytes((1024,)), Quantize(4).payload_bytes((1024,))
    (1040, 528)
    """

    def __init__(self, bits: int = 8, block_size: int = 256, stochastic: bool = False) -> None:
        """Creates a quantization to `bits` bits.

        Args:
            bits: 8 or 4.
            block_size: The number of values that share a scale, a multiple of 8.
            stochastic: Whether to round up or down at random, without bias.

        Raises:
            ValueError: An argument is invalid.
        """
        if bits not in (8, 4):
            raise ValueError(f"Invalid `bits`. Received: bits={bits!r}. Expected: 8 or 4.")
        _check_block_size(block_size, 8)
        self.bits, self.block_size, self.stochastic = bits, block_size, bool(stochastic)

    @property
    def needs_error_feedback(self) -> bool:
        return not self.stochastic

    @property
    def is_random(self) -> bool:
        return self.stochastic

    @property
    def block_values(self) -> int:
        return self.block_size

    @property
    def block_words(self) -> int:
        return self.block_size * self.bits // 32 + 1

    def encode_blocks(self, blocks: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        levels = 127.0 if self.bits == 8 else 7.0
        scaled, scales = scale_blocks(blocks, levels)
        if seed is None:
            integers = tf.round(scaled)
        else:
            integers = tf.floor(scaled + tf.random.stateless_uniform(tf.shape(scaled), seed))
            integers = tf.clip_by_value(integers, -levels, levels)
        if self.bits == 8:
            return words_with_scales(tf.bitcast(tf.cast(integers, tf.int8), tf.uint8), scales)
        low, high = tf.split(integers + 8.0, 2, axis=1)
        return words_with_scales(tf.cast(low + 16.0 * high, tf.uint8), scales)

    def decode_blocks(self, words: tf.Tensor) -> tf.Tensor:
        if self.bits == 8:
            integers, scales = codes_and_scales(words, tf.int8)
            return tf.cast(integers, tf.float32) * scales
        pairs, scales = codes_and_scales(words, tf.uint8)
        low = tf.bitwise.bitwise_and(pairs, tf.constant(15, tf.uint8))
        high = tf.bitwise.right_shift(pairs, tf.constant(4, tf.uint8))
        return (tf.cast(tf.concat([low, high], axis=1), tf.float32) - 8.0) * scales

    def finiteness_probe(self, words: tf.Tensor) -> tf.Tensor:
        return scales_of(words)


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
        _check_block_size(block_size, 32)
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


def _check_block_size(block_size: int, multiple: int) -> None:
    """Raises a ValueError unless `block_size` is a positive multiple of `multiple`."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size <= 0 or block_size % multiple:
        raise ValueError(
            f"Invalid `block_size`. Received: block_size={block_size!r}. Expected: a positive multiple of {multiple}."
        )


def _with_signs_of(signs: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Returns float32 numbers with the magnitudes of `scales` and the signs of the uint32 `signs`."""
    scales = tf.bitcast(scales, tf.uint32)
    return tf.bitcast(tf.bitwise.bitwise_or(tf.bitwise.bitwise_and(signs, _SIGN_BIT), scales), tf.float32)


def _places() -> tf.Tensor:
    return tf.constant([[place] for place in range(32)], tf.uint32)
