"""FailureRecovery in a directory whose training is finished: it says so, and trains on if more epochs are asked for."""

import signal
import warnings

import keras
import numpy as np
import pytest
from small_training import STEPS, fit

pytestmark = pytest.mark.usefixtures("cpus")


class StopAt(keras.callbacks.Callback):
    """Ends the training in its n-th step."""

    remembers_nothing = True

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
    """The warnings, of which each place in a program shows each once, as is usual."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("default")
        yield record


@pytest.mark.parametrize("verbose", [0, 2])
def test_every_fit_that_trains_nothing_says_so(tmp_path, seen, verbose):
    first = fit(tmp_path, epochs=1, verbose=verbose)[0].history["loss"]
    assert said(seen) == []
    for fold in (1, 2):
        assert fit(tmp_path, epochs=1, verbose=verbose)[0].history["loss"] == first
        assert len(said(seen)) == fold
    assert f"Nothing is trained, as the training in {str(tmp_path)!r} is complete." in said(seen)[0]
    assert "epochs=1, and a training of 1 epochs, to its end" in said(seen)[0]
    assert "Expected: more epochs" in said(seen)[0] and "or another directory" in said(seen)[0]


def test_more_epochs_are_trained(tmp_path, seen):
    fit(tmp_path, epochs=1)
    history, weights = fit(tmp_path, epochs=2)
    expected, same_weights = fit(tmp_path / "at once", epochs=2)
    assert history.history == expected.history and said(seen) == []
    assert all(np.array_equal(*pair) for pair in zip(weights, same_weights, strict=True))


@pytest.mark.parametrize("step", [STEPS, STEPS - 2])
def test_a_stopped_training_is_complete_until_more_epochs_are_asked_for(tmp_path, seen, step):
    assert fit(tmp_path, StopAt(step), epochs=3)[0].epoch == [0]
    for epochs in (2, 3):
        assert fit(tmp_path, epochs=epochs)[0].epoch == [0]
        assert "a training of 1 epochs, which a callback has ended by stop_training" in said(seen)[-1]
    history, _ = fit(tmp_path, epochs=4)
    assert history.epoch == [0, 1, 2, 3] and len(said(seen)) == 2
    assert fit(tmp_path, epochs=4)[0].history == history.history


class Preempted(StopAt):
    """Is told by a signal that the process has to end."""

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("epochs", [4, 2])
def test_a_training_that_has_gone_on_is_not_complete_before_its_end(tmp_path, seen, epochs):
    fit(tmp_path, StopAt(1), epochs=2)
    with pytest.raises(SystemExit):
        fit(tmp_path, Preempted(2), epochs=4)
    assert fit(tmp_path, epochs=epochs)[0].epoch == list(range(epochs))
    assert said(seen) == []
