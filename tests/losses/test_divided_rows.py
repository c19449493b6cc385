"""Which errors of a step are explained by the rows of a part of the batch, and of which tensors a step is warned."""

import types
import warnings

import keras
import pytest
import tensorflow as tf

from tfdist.losses import divided_rows
from tfdist.losses.divided_rows import DividedRows

TWO = DividedRows(parts=2, rows=8, total=16)
UNKNOWN = DividedRows(parts=2)
ABOUT_SHAPES = ValueError("Shapes (16, 6) and (8, 6) are incompatible")
OUT_OF_BOUNDS = tf.errors.InvalidArgumentError(None, None, "slice index 1 of dimension 0 out of bounds.")
BEYOND = tf.errors.InvalidArgumentError(None, None, "indices[3] = 9 is not in [0, 8)")


def notes(divided, error):
    """The notes of an error like `error` that is raised in a step, twice if it passes two contexts."""
    arguments = (None, None, error.message) if isinstance(error, tf.errors.OpError) else error.args
    with pytest.raises(type(error)) as caught, divided.explained(), divided.explained():
        raise type(error)(*arguments)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("error", [ABOUT_SHAPES, OUT_OF_BOUNDS, BEYOND])
def test_errors_about_the_rows_of_a_part_have_a_note(error):
    (note,) = notes(TWO, error)
    assert "Received: a part of 8 rows of a global batch of 16 rows, which is divided into 2." in note
    assert "Write `tf.shape(x)[0]` where the program contains the size of the global batch" in note


@pytest.mark.parametrize("error", [ABOUT_SHAPES, OUT_OF_BOUNDS])
def test_numbers_of_rows_that_are_not_known_while_tracing(error):
    (note,) = notes(UNKNOWN, error)
    assert "Received: a part of a global batch, which is divided into 2." in note


@pytest.mark.parametrize(
    ("divided", "error"),
    [
        (DividedRows(1, 16, 16), ABOUT_SHAPES),
        (DividedRows(1), OUT_OF_BOUNDS),
        (TWO, ValueError("Shapes (5, 3) and (8, 6) are incompatible")),
        (UNKNOWN, ValueError("Shapes (5, 3) and (7, 4) are incompatible")),
        (UNKNOWN, ValueError("Shapes (0, 3) and (7, 4) are incompatible")),
        (TWO, tf.errors.InvalidArgumentError(None, None, "indices[3] = 9 is not in [0, 9)")),
        (TWO, ValueError("The 16 names and the 8 numbers differ")),
        (TWO, KeyError("shape of 16")),
    ],
)
def test_other_errors_have_none(divided, error):
    assert notes(divided, error) == []


@pytest.mark.parametrize(
    ("counts", "replicas", "micro_batches", "expected"),
    [
        ([8, 8], 2, 1, DividedRows(2, 8, 16)),
        ([8], 4, 1, DividedRows(4, 8, 32)),  # this worker has one of four replicas
        ([8, 7], 4, 1, DividedRows(4, 8, 30)),
        ([8, 8], 2, 4, DividedRows(8, 2, 16)),
        ([8, None], 2, 1, DividedRows(2)),
        ([], 2, 4, DividedRows(8)),
    ],
)
def test_what_is_known_from_the_rows_of_replicas(counts, replicas, micro_batches, expected):
    assert DividedRows.of(counts, replicas, micro_batches) == expected


def warnings_of(make, monkeypatch, steps=1):
    """The warnings of steps on parts of 8 of 16 rows, which `make` traces for the samples of a part."""
    monkeypatch.setattr(divided_rows, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            with tf.Graph().as_default():
                samples = tf.compat.v1.placeholder(tf.float32, (8, 16))
                derived = [samples, tf.transpose(samples)]
                step = types.SimpleNamespace(holds_samples=lambda one, own=derived: any(one is each for each in own))
                with TWO.checked_literals() as traced:
                    make(*derived)
                    traced.append(step)
    return [str(each.message) for each in caught]


def noise(samples, transposed):
    tf.random.normal((16, 4))


def generated_rows(samples, transposed):
    tf.concat([samples, tf.zeros((16, 16))], axis=0)


def beside_features(samples, transposed):
    tf.concat([transposed, tf.zeros((16, 4))], axis=1)  # the features are as many as the rows
    tf.random.normal((16, 4))


def weights(samples, transposed):
    keras.initializers.RandomNormal(seed=1)((16, 4))


def two_parts(samples, transposed):
    tf.concat([samples, tf.zeros((8, 16))], axis=0)
    tf.random.normal((16, 4))


@pytest.mark.parametrize("make", [noise, generated_rows, beside_features])
def test_rows_for_the_global_batch_are_named_once(make, monkeypatch):
    (message,) = warnings_of(make, monkeypatch, steps=2)
    assert message.startswith("A step on 8 of the 16 rows of a global batch makes a tensor of 16 rows")
    assert f", in {make.__name__}. Expected: as many rows as the data has." in message


def like_features(samples, transposed):
    tf.random.normal(tf.shape(transposed))


@pytest.mark.parametrize("make", [weights, two_parts, like_features])
def test_rows_that_are_not_for_the_global_batch(make, monkeypatch):
    assert warnings_of(make, monkeypatch) == []
