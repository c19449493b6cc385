"""FailureRecovery in a directory whose training is finished: it warns, and continues if more epochs are requested."""

import signal
import warnings

import keras
import numpy as np
import pytest
from small_training import STEPS, fit

pytestmark = pytest.mark.usefixtures("cpus")


class StopAt(keras.callbacks.Callback):
    """Stops the training in its n-th step."""

    is_stateless = True

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.left == 0


def said(record):
    return [str(warning.message) for warning in record if "complete" in str(warning.message)]


@pytest.fixture
def seen():
    """The warnings that Python shows by default, which shows each once per place."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        yield record


@pytest.mark.parametrize("verbose", [0, 2])
def test_every_fit_that_trains_nothing_warns(tmp_path, seen, verbose):
    first = fit(tmp_path, epochs=1, verbose=verbose)[0].history["loss"]
    assert said(seen) == []
    for fold in (1, 2):
        assert fit(tmp_path, epochs=1, verbose=verbose)[0].history["loss"] == first
        assert len(said(seen)) == fold
    assert f"Training is already complete in {str(tmp_path)!r}" in said(seen)[0]
    assert "epochs=1, and a checkpoint of a completed training of 1 epochs;" in said(seen)[0]
    assert "Expected: more epochs" in said(seen)[0] and "or another directory" in said(seen)[0]


def test_more_epochs_are_trained(tmp_path, seen):
    fit(tmp_path, epochs=1)
    history, weights = fit(tmp_path, epochs=2)
    expected, same_weights = fit(tmp_path / "at once", epochs=2)
    assert history.history == expected.history and said(seen) == []
    assert all(np.array_equal(*pair) for pair in zip(weights, same_weights, strict=True))


@pytest.mark.parametrize("step", [STEPS, STEPS - 2])
def test_a_stopped_training_is_complete_until_more_epochs_are_requested(tmp_path, seen, step):
    assert fit(tmp_path, StopAt(step), epochs=3)[0].epoch == [0]
    for epochs in (2, 3):
        assert fit(tmp_path, epochs=epochs)[0].epoch == [0]
        assert "training of 1 epochs, ended by a callback that set stop_training" in said(seen)[-1]
    history, _ = fit(tmp_path, epochs=4)
    assert history.epoch == [0, 1, 2, 3] and len(said(seen)) == 2
    assert fit(tmp_path, epochs=4)[0].history == history.history


class Preempted(StopAt):
    """Receives a preemption signal."""

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("epochs", [4, 2])
def test_a_resumed_training_is_not_complete_before_its_end(tmp_path, seen, epochs):
    fit(tmp_path, StopAt(1), epochs=2)
    with pytest.raises(SystemExit):
        fit(tmp_path, Preempted(2), epochs=4)
    assert fit(tmp_path, epochs=epochs)[0].epoch == list(range(epochs))
    assert said(seen) == []
