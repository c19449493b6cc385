"""FailureRecovery with TerminateOnNaN: the step with a loss that is not finite is not saved."""

import signal
import warnings

import keras
import numpy as np
import pytest
from interruptions import Interrupt
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
    return [entry.metadata["step"] for entry in CheckpointStore(directory).list_checkpoints()]


@pytest.mark.parametrize("intervals", [{"every_steps": 1}, {"every_steps": 2}])
def test_nothing_is_saved_with_the_step_or_after_it(tmp_path, intervals):
    _, _, (warned,) = train(tmp_path, keras.callbacks.TerminateOnNaN(), inputs=BROKEN, keep=9, **intervals)
    assert saved_steps(tmp_path) == list(range(intervals["every_steps"], AT_STEP, intervals["every_steps"]))
    assert warned.startswith("TerminateOnNaN has ended the training, which is not marked as complete. Received: a loss")
    assert f"at step {AT_STEP}" in warned and str(tmp_path) in warned and "remove the newest" in warned


def test_it_resumes_when_the_data_is_repaired(tmp_path):
    expected, same_weights, _ = train(tmp_path / "undisturbed", keras.callbacks.TerminateOnNaN(), every_steps=1)
    train(tmp_path / "disturbed", keras.callbacks.TerminateOnNaN(), inputs=BROKEN, every_steps=1)
    history, weights, warned = train(tmp_path / "disturbed", keras.callbacks.TerminateOnNaN(), every_steps=1)
    assert history.history == expected.history and warned == []
    assert all(np.array_equal(*pair) for pair in zip(weights, same_weights, strict=True))


def test_a_step_after_a_finished_epoch(tmp_path):
    train(tmp_path, keras.callbacks.TerminateOnNaN(), epochs=1)
    train(tmp_path, keras.callbacks.TerminateOnNaN(), inputs=BROKEN, epochs=3)
    assert saved_steps(tmp_path) == [STEPS]


def test_a_loss_that_is_not_finite_ends_nothing_without_that_callback(tmp_path):
    history, _, warned = train(tmp_path, inputs=BROKEN)
    assert history.epoch == [0, 1] and warned == [] and saved_steps(tmp_path) == [STEPS, 2 * STEPS]


class Patient(keras.callbacks.TerminateOnNaN):
    """Ends the training at its third loss that is not finite."""

    is_stateless = True

    def __init__(self):
        super().__init__()
        self.seen = 0

    def on_batch_end(self, batch, logs=None):
        self.seen += not np.isfinite(logs["loss"])
        if self.seen == 3:
            self.model.stop_training = True


class TrainsOn(keras.callbacks.Callback):
    """Unsets, in one of its hooks, what another callback has set, and resets the weights."""

    is_stateless = True

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, self.set_back)

    def set_back(self, *_, **__):
        self.model.stop_training = False
        self.model.set_weights([np.zeros_like(weight) for weight in self.model.get_weights()])

    def on_train_batch_end(self, batch, logs=None):
        """Overridden, so that Keras calls it."""


def test_a_subclass_may_accept_some_losses(tmp_path):
    _, _, (warned,) = train(tmp_path, Patient(), inputs=BROKEN, keep=9, every_steps=1)
    assert saved_steps(tmp_path) == list(range(1, AT_STEP + 2)) and f"at step {AT_STEP + 2}" in warned


@pytest.mark.parametrize(
    ("hook", "steps"), [("on_train_batch_end", [*range(1, 13), 12]), ("on_epoch_end", [1, 2, 3, 5, 6, 7, 2 * AT_STEP])]
)
def test_another_callback_may_unset_stop_training(tmp_path, hook, steps):
    overruled = keras.callbacks.TerminateOnNaN(), TrainsOn(hook)
    history, _, warned = train(tmp_path, *overruled, inputs=BROKEN, every_steps=1, keep=99)
    assert history.epoch == [0, 1] and warned == []
    assert saved_steps(tmp_path) == steps


def test_a_signal_after_a_loss_that_was_accepted(tmp_path):
    signalling = Interrupt("on_train_batch_end", AT_STEP + 1, signal.SIGTERM)
    with pytest.raises(SystemExit):
        train(tmp_path, Patient(), signalling, inputs=BROKEN)
    assert saved_steps(tmp_path) == [AT_STEP + 1]
