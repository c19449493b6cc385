"""Bits and sums of tensors of all dtypes."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.tensorflow_internals.sent_dtypes import (
    SUMMED,
    SUMMED_BY_GPUS,
    as_sum,
    as_values,
    as_words,
    from_words,
    to_words,
)

pytestmark = pytest.mark.usefixtures("cpus")
INTEGERS = "int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()
FLOATS = "float8_e4m3fn float8_e5m2 bfloat16 float16 float32 float64".split()
NUMBERS = (*INTEGERS, *FLOATS, "complex64", "complex128")


def numbers(dtype, shape):
    values = np.random.default_rng(0).integers(0, 4, shape)
    return tf.cast(tf.cast(values, tf.int8 if dtype in INTEGERS else tf.float32), dtype)


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (0, 2)])
def test_words_hold_all_bits(shape):
    """Eagerly, and in one function in which the sizes are not known."""
    tensors = [numbers(dtype, shape) for dtype in (*NUMBERS, "bool")]

    def through_words(*tensors):
        pairs = [as_words(tensor) for tensor in tensors]
        assert {words.dtype for words, _ in pairs} == {tf.int32}
        return [restored(words) for words, restored in pairs]

    signature = [tf.TensorSpec([None] * len(shape), tensor.dtype) for tensor in tensors]
    in_graph = tf.function(through_words, input_signature=signature, autograph=False)
    for found in (through_words(*tensors), in_graph(*tensors)):
        for result, tensor in zip(found, tensors, strict=True):
            assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
            assert result.numpy().tobytes() == tensor.numpy().tobytes(), tensor.dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint16", "complex64", "float64"])
def test_rows_keep_their_places(dtype):
    rows = numbers(dtype, (3, 5))
    words = to_words(rows)
    assert words.shape[0] == 3
    assert from_words(words, rows.dtype, 3, 5).numpy().tobytes() == rows.numpy().tobytes()


@pytest.mark.parametrize(("by_gpus", "dtypes"), [(False, SUMMED), (True, SUMMED_BY_GPUS)], ids=["CPUs", "GPUs"])
def test_sums_are_those_of_the_dtype(by_gpus, dtypes):
    for dtype in NUMBERS:
        tensor = numbers(dtype, (4,))
        sent, restored = as_sum(tensor, by_gpus=by_gpus)
        assert sent.dtype in dtypes
        assert restored(sent + sent).numpy().tobytes() == numbers_doubled(dtype).numpy().tobytes(), dtype


def numbers_doubled(dtype):
    values = 2 * np.random.default_rng(0).integers(0, 4, (4,))
    return tf.cast(tf.cast(values, tf.int8 if dtype in INTEGERS else tf.float32), dtype)


@pytest.mark.parametrize("by_gpus", [False, True])
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("int8", 127), ("uint8", 255), ("uint32", 2**32 - 1), ("int16", 2**15 - 1), ("int32", 2**31 - 1)],
)
def test_sums_of_whole_numbers_wrap_around(dtype, largest, by_gpus):
    tensor = tf.constant([largest], dtype)
    sent, restored = as_sum(tensor, by_gpus=by_gpus)
    assert restored(sent + sent).numpy() == (tensor + tensor).numpy()


def test_values_have_kernels_and_come_back():
    for dtype in ("bool", "int4", "float8_e5m2", "float32"):
        tensor = tf.cast(tf.constant([[0, 1]], tf.int8 if dtype == "int4" else tf.float32), dtype)
        values, restored = as_values(tensor)
        assert restored(tf.transpose(values)).numpy().tobytes() == tensor.numpy().tobytes()
