"""Values go through JSON and come back as they were."""

import json
import math
import random

import numpy as np
import pytest
import tensorflow as tf

from tfdist.utils.json_state import from_json, from_text, to_json, to_text

pytestmark = pytest.mark.usefixtures("cpus")

VALUES = [
    None,
    True,
    3,
    1 << 100,
    -0.0,
    0.1 + 0.2,
    5e-324,
    math.inf,
    -math.inf,
    "text \udc80",
    [1, [2.5, None]],
    (1, (2,)),
    {"dict": {"tuple": [1]}, "tensor": "name"},
    {},
    np.float32(0.1),
    np.int64(-3),
    np.bool_(True),
    np.float64("inf"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value):
    back = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert back == value and type(back) is type(value)
    assert str(back) == str(value)  # also the sign of a zero


def test_nan_comes_back():
    back = from_json(json.loads(json.dumps(to_json([math.nan, np.float32("nan")]), allow_nan=False)))
    assert math.isnan(back[0]) and math.isnan(back[1]) and isinstance(back[1], np.float32)


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype="uint32").reshape(2, 3), np.array([0.1, np.inf], "float32"), np.zeros((0, 3)), np.array(2)],
)
def test_arrays_come_back_written_out_and_as_tensors(array):
    for tensors in (None, {}):
        notes = json.loads(json.dumps(to_json({"a": [array]}, tensors, "state"), allow_nan=False))
        back = from_json(notes, tensors)["a"][0]
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
        assert tensors is None or list(tensors) == ["state/a/0"]


def test_a_saved_array_is_a_copy():
    array, tensors = np.zeros(2), {}
    notes = to_json(array, tensors)
    array[0] = 1
    back = from_json(notes, tensors)
    assert back.tolist() == [0, 0]
    back[0] = 2
    assert tensors["value"].tolist() == [0, 0]


def test_tensors_become_numbers():
    assert from_json(to_json(tf.constant(0.5))) == np.float32(0.5)


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, {3}, np.array(["text"]), np.array([None]), b"bytes"],
    ids=["object", "numbers as keys", "set", "strings", "objects", "bytes"],
)
def test_what_cannot_be_saved_is_named(value):
    with pytest.raises(ValueError, match=r"'state/seen/0' cannot be saved. Received: .*Expected: None, bool"):
        to_json({"seen": [value]}, {}, "state")


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64", "Python"])
def test_states_of_generators_become_short_text(kind):
    state = random.getstate() if kind == "Python" else getattr(np.random, kind)(5).state
    text = to_text(state)
    assert len(text) < 4000
    restored = from_text(text)
    if kind == "Python":
        assert restored == state
    else:
        np.testing.assert_equal(restored, state)
        generator = np.random.Generator(getattr(np.random, kind)(6))
        generator.bit_generator.state = restored
        assert generator.random() == np.random.Generator(getattr(np.random, kind)(5)).random()


@pytest.mark.parametrize(
    "value",
    [(1 << 32,) * 101, (-1,) * 101, (True,) * 101, (0.5,) * 101, np.arange(6, dtype=">i2").reshape(2, 3)],
    ids=["large", "negative", "bool", "float", "array"],
)
def test_text_keeps_values_that_are_not_unsigned_words(value):
    restored = from_text(to_text(value))
    np.testing.assert_equal(restored, value)
    if isinstance(value, tuple):
        assert type(restored) is tuple and {type(item) for item in restored} == {type(value[0])}
    else:
        assert restored.dtype == value.dtype and restored.flags.writeable
