"""Casts to floating-point formats of 16 and 8 bits."""

from typing import Any

import tensorflow as tf

from tfdist.compression.block_compressor import BlockCompressor

_LARGEST_FLOAT16 = 65504.0
_LARGEST_FLOAT8 = 1.75  # 448 with the exponents of float16
_SMALLEST = 1e-30  # Blocks of smaller values become zero: their scale has no reciprocal in float32.


class Cast(BlockCompressor):
    """Rounds each value to a shorter floating-point format. Sums are computed in float32 and rounded once.

    - `bfloat16`: 2 bytes a value; relative error at most 2^-9; the range of float32.
    - `float16`: 2 bytes; relative error at most 2^-12 between 6e-5 and 65504. Larger values become 65504 and smaller
      values lose digits, so error feedback is on by default.
    - `float8`: E4M3 (Micikevicius et al. 2022, "FP8 formats for deep learning") with a float32 scale for each block of
      128 values, `max |x| / 448`: 1.03 bytes a value; relative error at most 2^-4 down to 1/28,000 of the largest value
      of a block; error feedback by default.

    Cost: one pass over the values each way.

    >>> Cast("bfloat16").payload_bytes((1000,)), Cast("float8").payload_bytes((1000,))
    (2000, 1056)
    """

    def __init__(self, dtype: Any = "bfloat16") -> None:
        """Creates a cast to `dtype`.

        Args:
            dtype: "bfloat16", "float16" or "float8", or TensorFlow's dtypes of these names.

        Raises:
            ValueError: `dtype` is another format.
        """
        name = {"float8_e4m3fn": "float8"}.get(name := getattr(dtype, "name", dtype), name)
        if name not in ("bfloat16", "float16", "float8"):
            raise ValueError(
                f"Invalid `dtype` of a cast. Received: dtype={dtype!r}. Expected: 'bfloat16', 'float16' or 'float8'."
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
            # Finite values saturate. The difference of a value and itself is 0, or NaN for NaN and Inf.
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

    def finiteness_probe(self, words: tf.Tensor) -> tf.Tensor:
        return scales_of(words) if self.dtype == "float8" else self.decode_blocks(words)


def scale_blocks(blocks: tf.Tensor, largest: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Divides each block by its scale, `[blocks, 1]`, so that its largest magnitude becomes `largest`.

    The scale of a block with NaN or Inf is not finite; that of a block of zeros is 0.
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
    """Returns the scales, `[blocks, 1]`, that `words_with_scales` has packed."""
    return tf.bitcast(words[:, -1:], tf.float32)


def codes_and_scales(words: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Unpacks the result of `words_with_scales`; the codes have the 8-bit `dtype`."""
    codes = tf.reshape(tf.bitcast(words[:, :-1], dtype), [-1, 4 * (words.shape[1] - 1)])
    return codes, scales_of(words)


def _to_float8(values: tf.Tensor) -> tf.Tensor:
    """Encodes `256 * values` as E4M3, uint8.

    E4M3 divided by 256 has the exponents of float16, subnormal numbers included, except for the highest of the five
    bits, which is 0 below 2. So the code is a float16 without that bit and the last seven bits, rounded to nearest
    even. (TensorFlow casts to float8, but has no `bitcast` for it.)
    """
    bits = tf.bitcast(tf.cast(values, tf.float16), tf.int16)
    magnitude = tf.bitwise.bitwise_and(bits, 0x7FFF)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(magnitude, 7), 1)
    # `magnitude + 63 + odd`. Of two sums TensorFlow would make an `AddN`, which has no kernel for int16 on GPUs.
    rounded = tf.bitwise.right_shift(magnitude + 62 - tf.bitwise.invert(odd), 7)
    sign = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 8), 128)
    return tf.cast(tf.bitwise.bitwise_or(rounded, sign), tf.uint8)


def _from_float8(codes: tf.Tensor) -> tf.Tensor:
    """Decodes the result of `_to_float8` to float16."""
    bits = tf.cast(codes, tf.int16)
    magnitude = tf.bitwise.left_shift(tf.bitwise.bitwise_and(bits, 127), 7)
    sign = tf.bitwise.left_shift(tf.bitwise.bitwise_and(bits, 128), 8)
    return tf.bitcast(tf.bitwise.bitwise_or(magnitude, sign), tf.float16)
