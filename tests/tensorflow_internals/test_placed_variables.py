"""Reads variables of other processes in pieces."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.tensorflow_internals import placed_strategy
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.mark.parametrize("dtype", [np.float32, np.int8, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(7, 11), (64,), (5, 1, 13)])
def test_pieces_are_the_value(shape: tuple[int, ...], dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placed_strategy, "_PIECE", 8)
    value = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with tf.device("CPU:0"):
        received = placed_strategy._received(ColumnVariable(value, shape=shape))
    assert received.dtype == value.dtype
    np.testing.assert_array_equal(received, value)


def test_arrays_have_the_dtype_that_is_asked_for() -> None:
    variable = ColumnVariable([1.5, 2.0])
    assert np.array(variable).dtype == np.float32
    np.testing.assert_array_equal(np.array(variable, np.float64), [1.5, 2.0])
    assert np.array(ColumnVariable(3)).shape == ()
