"""Signals and FailureRecovery: once `fit` has been left, also by an exception, they do what they did before it."""

import gc
import os
import signal

import keras
import numpy as np
import pytest
from interruptions import Interrupt, Interrupted
from small_training import STEPS, assert_same, fit, small_model

from tfdist.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("cpus")
SIGNALS = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture
def heard():
    """What a program has heard by its own handlers."""
    numbers = []
    before = {number: signal.signal(number, lambda number, frame: numbers.append(number)) for number in SIGNALS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_after_an_exception_the_programs_handler_is_called_at_once(tmp_path, heard, number):
    # The exception holds the frames of `fit`, as a notebook does.
    with pytest.raises(Interrupted) as held:
        fit(tmp_path, Interrupt("on_train_batch_end", 3))
    os.kill(os.getpid(), number)
    assert heard == [number] and held.tb is not None
    os.kill(os.getpid(), number)
    assert heard == [number] * 2


def test_an_interrupted_fit_that_is_forgotten_leaves_what_was_set_since(tmp_path, heard):
    with pytest.raises(Interrupted):
        fit(tmp_path / "first", Interrupt("on_train_batch_end", 3))
    gc.collect()
    mine = [lambda *_: None for _ in SIGNALS]
    for number, handler in zip(SIGNALS, mine, strict=True):
        signal.signal(number, handler)
    fit(tmp_path / "second", epochs=1)
    assert [signal.getsignal(number) for number in SIGNALS] == mine


class Other(keras.callbacks.Callback):
    """Trains another model within a step, where a signal comes."""

    remembers_nothing = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            data = [[0.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]]
            signalling = Interrupt("on_train_batch_end", 1, signal.SIGTERM)
            small_model().fit(*map(keras.ops.array, data), verbose=0, callbacks=[signalling])


def test_a_signal_within_fit_is_heeded_however_deep(tmp_path, heard):
    with pytest.raises(SystemExit):
        fit(tmp_path, Other(), every_epochs=100)
    assert heard == []


def test_another_fit_after_an_exception_is_not_this_one(tmp_path, heard):
    with pytest.raises(Interrupted) as held:
        fit(tmp_path, Interrupt("on_train_batch_end", 3))
    data = [[0.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]]
    told = Interrupt("on_train_batch_end", 1, signal.SIGTERM)
    small_model().fit(*map(keras.ops.array, data), verbose=0, callbacks=[told])
    assert heard == [signal.SIGTERM] and held.tb is not None


class OwnFit(keras.Sequential):
    def fit(self, *arguments, **keywords):
        return super().fit(*arguments, **keywords)


def test_a_model_with_a_fit_of_its_own(tmp_path, heard):
    told = Interrupt("on_train_batch_end", STEPS, signal.SIGUSR1)
    with pytest.raises(SystemExit):
        fit(tmp_path, told, model=small_model(of=OwnFit), every_epochs=100)
    assert heard == []


def test_a_signal_at_the_end_of_the_last_epoch_ends_the_next_fit(tmp_path, heard):
    """As where folds are trained one after another: what comes behind this one would be killed."""
    expected = fit(tmp_path / "undisturbed", epochs=1)
    done = fit(tmp_path / "first", Interrupt("on_epoch_end", 1, signal.SIGTERM), epochs=1)
    assert all(map(np.array_equal, expected[1], done[1]))
    with pytest.raises(SystemExit):
        fit(tmp_path / "second", every_epochs=100)
    assert CheckpointStore(tmp_path / "second").newest()[0].facts["step"] == 1
    assert heard == []
    fit(tmp_path / "third", epochs=1)  # as in a notebook, which goes on


class StopAt(keras.callbacks.Callback):
    """Ends the training behind a step."""

    def __init__(self, step):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.model.stop_training = True

    def get_state(self):
        return {"left": self.left}

    def set_state(self, state):
        self.left = state["left"]


def test_killed_behind_a_step_that_stops_and_was_to_be_saved(tmp_path):
    expected = fit(tmp_path / "undisturbed", StopAt(4), epochs=3, every_steps=2)
    with pytest.raises(Interrupted):
        fit(tmp_path / "disturbed", StopAt(4), Interrupt("on_epoch_end", 1), epochs=3, every_steps=2)
    assert_same(expected, fit(tmp_path / "disturbed", StopAt(4), epochs=3, every_steps=2))


def test_told_by_a_signal_in_the_step_that_stops(tmp_path, heard):
    expected = fit(tmp_path / "undisturbed", StopAt(4), epochs=3)
    assert_same(
        expected, fit(tmp_path / "disturbed", StopAt(4), Interrupt("on_train_batch_end", 4, signal.SIGTERM), epochs=3)
    )
    assert_same(expected, fit(tmp_path / "disturbed", StopAt(4), epochs=3))
