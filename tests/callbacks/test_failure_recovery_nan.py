"""FailureRecovery beside TerminateOnNaN: what a training has come to that was ended by it is not kept."""

import warnings

import keras
import numpy as np
import pytest
from small_training import INPUTS, STEPS, fit

from tfdist.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("cpus")
AT_STEP = 4
BROKEN = INPUTS.copy()
BROKEN[4 * AT_STEP - 1] = np.nan


def train(directory, *callbacks, inputs=INPUTS, **arguments):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        history, weights = fit(directory, *callbacks, inputs=inputs, shuffle=False, **arguments)
    return history, weights, [str(warning.message) for warning in seen if "TerminateOnNaN" in str(warning.message)]


def saved_steps(directory):
    return [entry.facts["step"] for entry in CheckpointStore(directory).entries()]


@pytest.mark.parametrize("intervals", [{"every_steps": 1}, {"every_steps": 2}])
def test_nothing_is_saved_with_the_step_or_after_it(tmp_path, intervals):
    _, _, (told,) = train(tmp_path, keras.callbacks.TerminateOnNaN(), inputs=BROKEN, keep=9, **intervals)
    assert saved_steps(tmp_path) == list(range(intervals["every_steps"], AT_STEP, intervals["every_steps"]))
    assert told.startswith("TerminateOnNaN has ended the training, which is not marked as complete. Received: a loss")
    assert f"at step {AT_STEP}" in told and str(tmp_path) in told and "remove the newest" in told


def test_it_goes_on_when_the_data_is_repaired(tmp_path):
    expected, same_weights, _ = train(tmp_path / "undisturbed", keras.callbacks.TerminateOnNaN(), every_steps=1)
    train(tmp_path / "disturbed", keras.callbacks.TerminateOnNaN(), inputs=BROKEN, every_steps=1)
    history, weights, told = train(tmp_path / "disturbed", keras.callbacks.TerminateOnNaN(), every_steps=1)
    assert history.history == expected.history and told == []
    assert all(np.array_equal(*pair) for pair in zip(weights, same_weights, strict=True))


def test_a_step_behind_a_finished_epoch(tmp_path):
    train(tmp_path, keras.callbacks.TerminateOnNaN(), epochs=1)
    train(tmp_path, keras.callbacks.TerminateOnNaN(), inputs=BROKEN, epochs=3)
    assert saved_steps(tmp_path) == [STEPS]


def test_a_loss_that_is_not_finite_ends_nothing_without_that_callback(tmp_path):
    history, _, told = train(tmp_path, inputs=BROKEN)
    assert history.epoch == [0, 1] and told == [] and saved_steps(tmp_path) == [STEPS, 2 * STEPS]
