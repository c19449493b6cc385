"""Results of workers' functions are packed into one tensor where possible, and unpacked to the bit."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.parameter_server.step_results import ResultPacking

pytestmark = pytest.mark.usefixtures("cpus")

NUMBERS = {
    "bool": [True, False],
    "int8": [-128, 127],
    "uint8": [0, 255],
    "int16": [-(2**15), 2**15 - 1],
    "uint16": [0, 2**16 - 1],
    "int32": [-(2**31), 2**31 - 1],
    "uint32": [0, 2**32 - 1],
    "int64": [-(2**63), 2**63 - 1, 2**53 + 1, 0, -1],
    "uint64": [0, 2**64 - 1, 2**53 + 1],
    "float16": [1 / 3, -np.inf, np.nan],
    "bfloat16": [1 / 3, np.inf, np.nan],
    "float32": [1 / 3, 1e-45, -0.0, np.nan],
    "float64": [1 / 3, 5e-324, np.inf],
}


def packed_and_unpacked(structure: Any) -> tuple[int, Any]:
    """Returns the number of tensors, and the unpacked structure."""
    packing = ResultPacking()
    tensors = tf.function(lambda: packing.pack(structure))()
    return len(tensors), packing.unpack(tensors)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers_are_unpacked_to_the_bit(dtype: str) -> None:
    value = tf.constant(np.array(NUMBERS[dtype], tf.as_dtype(dtype).as_numpy_dtype))
    count, found = packed_and_unpacked({"logs": {"x": value}, "metrics": [value[0], tf.reshape(value, [1, -1])]})
    assert count == 1
    for part, sent in (
        (found["logs"]["x"], value),
        (found["metrics"][0], value[0]),
        (found["metrics"][1], value[None]),
    ):
        assert part.dtype == sent.numpy().dtype and part.shape == sent.shape
        assert part.tobytes() == sent.numpy().tobytes()


def test_strings_and_tensors_of_unknown_size_are_sent_separately() -> None:
    packing = ResultPacking()

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def function(rows: tf.Tensor) -> list[tf.Tensor]:
        return packing.pack({"a": tf.constant(1), "rows": rows, "text": tf.constant("b"), "z": tf.constant(2.5)})

    tensors = function(tf.constant([3.0, 4.0]))
    found = packing.unpack(tensors)
    assert len(tensors) == 3
    assert (int(found["a"]), float(found["z"]), found["text"].numpy()) == (1, 2.5, b"b")
    assert found["rows"].numpy().tolist() == [3.0, 4.0]


def test_each_trace_has_a_layout() -> None:
    packing = ResultPacking()
    function = tf.function(lambda x: packing.pack({"x": x, "sum": tf.reduce_sum(x)}))
    short, long = function(tf.ones([2])), function(tf.ones([3], tf.int64))
    assert packing.unpack(short)["x"].tolist() == [1.0, 1.0]
    assert packing.unpack(long)["x"].tolist() == [1, 1, 1] and packing.unpack(long)["x"].dtype == np.int64
    assert packing.unpack(function(tf.zeros([2])))["sum"] == 0
