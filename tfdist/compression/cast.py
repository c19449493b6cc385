"""Casts to floating-point formats of 16 and 8 bits."""

from typing import Any

import tensorflow as tf

from tfdist.compression.blocks import BlockCompressor

_LARGEST_FLOAT16 = 65504.0
_LARGEST_FLOAT8 = 1.75  # 448 with the exponents of float16
_SMALLEST = 1e-30  # blocks of smaller values are zero: their scale has no reciprocal in float32


class Cast(BlockCompressor):
    """Rounds every value to a shorter floating-point format; sums are formed in float32 and rounded once.

    - `bfloat16`: 2 bytes a value; relative error at most 2^-9; the range of float32.
    - `float16`: 2 bytes; relative error at most 2^-12 between 6e-5 and 65504. Larger values become 65504 and smaller
      ones lose digits, so that error feedback is on by default.
    - `float8`: E4M3 (Micikevicius et al. 2022, "FP8 formats for deep learning") with a float32 scale for each block of
      128 values, `max |x| / 448`: 1.03 bytes a value; relative error at most 2^-4 down to 1/28,000 of the largest value
      of a block; error feedback by default.

    Cost: one pass over the values each way.

    >>> Cast("bfloat16").payload_bytes((1000,)), Cast("float8").payload_bytes((1000,))
    (2000, 1056)
    """

    def __init__(self, dtype: Any = "bfloat16") -> None:
        """Casts to `dtype`.

        Args:
          dtype: "bfloat16", "float16" or "float8", or TensorFlow's dtypes of these names.

        Raises:
          ValueError: another dtype.
        """
        name = {"float8_e4m3fn": "float8"}.get(name := getattr(dtype, "name", dtype), name)
        if name not in ("bfloat16", "float16", "float8"):
            raise ValueError(
                f"Gradients cannot be cast to this format. Received: dtype={dtype!r}. Expected: 'bfloat16', 'float16' "
                "or 'float8'."
            )
        self.dtype = name

    @property
    def needs_error_feedback(self) -> bool:
        return self.dtype != "bfloat16"

    @property
    def block_values(self) -> int:
        return 128 if self.dtype == "float8" else 2

    @property
    def block_words(self) -> int:
        return 33 if self.dtype == "float8" else 1

    def encode_blocks(self, blocks: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        if self.dtype == "bfloat16":
            return tf.bitcast(tf.cast(blocks, tf.bfloat16), tf.int32)[:, tf.newaxis]
        if self.dtype == "float16":
            # Finite values saturate; the difference of a value and itself hands NaN and Inf on, as NaN.
            saturated = tf.clip_by_value(blocks, -_LARGEST_FLOAT16, _LARGEST_FLOAT16) + (blocks - blocks)
            return tf.bitcast(tf.cast(saturated, tf.float16), tf.int32)[:, tf.newaxis]
        scaled, scales = scale_blocks(blocks, _LARGEST_FLOAT8)
        return words_with_scales(_to_float8(scaled), scales)

    def decode_blocks(self, words: tf.Tensor) -> tf.Tensor:
        if self.dtype != "float8":
            short = tf.bitcast(words[:, 0], tf.bfloat16 if self.dtype == "bfloat16" else tf.float16)
            return tf.cast(short, tf.float32)
        codes, scales = codes_and_scales(words, tf.uint8)
        return tf.cast(_from_float8(codes), tf.float32) * scales

    def magnitudes(self, words: tf.Tensor) -> tf.Tensor:
        return scales_of(words) if self.dtype == "float8" else self.decode_blocks(words)


def scale_blocks(blocks: tf.Tensor, largest: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Divides each block by its scale, `[blocks, 1]`, so that its largest magnitude becomes `largest`.

    The scale of a block that holds NaN or Inf is not finite; that of a block of zeros is 0.
    """
    magnitude = tf.reduce_max(tf.abs(blocks), axis=1, keepdims=True)
    usable = magnitude > _SMALLEST
    reciprocal = tf.where(usable, largest / magnitude, tf.zeros_like(magnitude))
    unusable = tf.where(tf.math.is_finite(magnitude), tf.zeros_like(magnitude), magnitude)
    return blocks * reciprocal, tf.where(usable, magnitude / largest, unusable)


def words_with_scales(codes: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Packs codes of 8 bits, `[blocks, values]`, and the blocks' scales into words of 32 bits."""
    words = tf.bitcast(tf.reshape(codes, [-1, codes.shape[1] // 4, 4]), tf.int32)
    return tf.concat([words, tf.bitcast(scales, tf.int32)], axis=1)


def scales_of(words: tf.Tensor) -> tf.Tensor:
    """The scales that `words_with_scales` has packed, `[blocks, 1]`."""
    return tf.bitcast(words[:, -1:], tf.float32)


def codes_and_scales(words: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """What `words_with_scales` has packed, the codes as 8-bit `dtype`."""
    codes = tf.reshape(tf.bitcast(words[:, :-1], dtype), [-1, 4 * (words.shape[1] - 1)])
    return codes, scales_of(words)


def _to_float8(values: tf.Tensor) -> tf.Tensor:
    """E4M3 codes, uint8, of `256 * values`.

    E4M3 divided by 256 has the exponents of float16, down to the subnormal numbers, but for the highest bit of its
    five, which is 0 below 2. So the code is a float16 without that bit and the last seven, rounded to nearest even.
    (TensorFlow casts to float8 and has no `bitcast` of it.)
    """
    bits = tf.bitcast(tf.cast(values, tf.float16), tf.int16)
    magnitude = tf.bitwise.bitwise_and(bits, 0x7FFF)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(magnitude, 7), 1)
    rounded = tf.bitwise.right_shift(magnitude + 63 + odd, 7)
    sign = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 8), 128)
    return tf.cast(tf.bitwise.bitwise_or(rounded, sign), tf.uint8)


def _from_float8(codes: tf.Tensor) -> tf.Tensor:
    """The float16 values that `_to_float8` has encoded."""
    bits = tf.cast(codes, tf.int16)
    magnitude = tf.bitwise.left_shift(tf.bitwise.bitwise_and(bits, 127), 7)
    sign = tf.bitwise.left_shift(tf.bitwise.bitwise_and(bits, 128), 8)
    return tf.bitcast(tf.bitwise.bitwise_or(magnitude, sign), tf.float16)
