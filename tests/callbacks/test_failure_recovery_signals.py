"""Signals and FailureRecovery: after `fit` has ended, also by an exception, they have their previous effect."""

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
def received():
    """The signals that the program's own handlers have received."""
    numbers = []
    before = {number: signal.signal(number, lambda number, frame: numbers.append(number)) for number in SIGNALS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_after_an_exception_the_programs_handler_is_called_at_once(tmp_path, received, number):
    # The exception holds the frames of `fit`, as a notebook does.
    with pytest.raises(Interrupted) as held:
        fit(tmp_path, Interrupt("on_train_batch_end", 3))
    os.kill(os.getpid(), number)
    assert received == [number] and held.tb is not None
    os.kill(os.getpid(), number)
    assert received == [number] * 2


def test_an_interrupted_fit_that_is_collected_keeps_later_handlers(tmp_path, received):
    with pytest.raises(Interrupted):
        fit(tmp_path / "first", Interrupt("on_train_batch_end", 3))
    gc.collect()
    mine = [lambda *_: None for _ in SIGNALS]
    for number, handler in zip(SIGNALS, mine, strict=True):
        signal.signal(number, handler)
    fit(tmp_path / "second", epochs=1)
    assert [signal.getsignal(number) for number in SIGNALS] == mine


class Other(keras.callbacks.Callback):
    """Trains another model within a step, in which a signal arrives."""

    is_stateless = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            data = [[0.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]]
            signalling = Interrupt("on_train_batch_end", 1, signal.SIGTERM)
            small_model().fit(*map(keras.ops.array, data), verbose=0, callbacks=[signalling])


def test_a_signal_within_a_nested_fit_counts(tmp_path, received):
    with pytest.raises(SystemExit):
        fit(tmp_path, Other(), every_epochs=100)
    assert received == []


def test_another_fit_after_an_exception_is_not_this_one(tmp_path, received):
    with pytest.raises(Interrupted) as held:
        fit(tmp_path, Interrupt("on_train_batch_end", 3))
    data = [[0.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]]
    signalled = Interrupt("on_train_batch_end", 1, signal.SIGTERM)
    small_model().fit(*map(keras.ops.array, data), verbose=0, callbacks=[signalled])
    assert received == [signal.SIGTERM] and held.tb is not None


class OwnFit(keras.Sequential):
    def fit(self, *arguments, **keywords):
        return super().fit(*arguments, **keywords)


def test_a_model_that_overrides_fit(tmp_path, received):
    signalled = Interrupt("on_train_batch_end", STEPS, signal.SIGUSR1)
    with pytest.raises(SystemExit):
        fit(tmp_path, signalled, model=small_model(of=OwnFit), every_epochs=100)
    assert received == []


def test_a_signal_at_the_end_of_the_last_epoch_ends_the_next_fit(tmp_path, received):
    """For example if folds are trained one after another: the next one would be killed."""
    expected = fit(tmp_path / "undisturbed", epochs=1)
    done = fit(tmp_path / "first", Interrupt("on_epoch_end", 1, signal.SIGTERM), epochs=1)
    assert all(map(np.array_equal, expected[1], done[1]))
    with pytest.raises(SystemExit):
        fit(tmp_path / "second", every_epochs=100)
    assert CheckpointStore(tmp_path / "second").newest()[0].metadata["step"] == 1
    assert received == []
    fit(tmp_path / "third", epochs=1)  # the process may continue, as a notebook does


class StopAt(keras.callbacks.Callback):
    """Stops the training after a step."""

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


def test_killed_after_a_step_that_stops_and_is_due_to_be_saved(tmp_path):
    expected = fit(tmp_path / "undisturbed", StopAt(4), epochs=3, every_steps=2)
    with pytest.raises(Interrupted):
        fit(tmp_path / "disturbed", StopAt(4), Interrupt("on_epoch_end", 1), epochs=3, every_steps=2)
    assert_same(expected, fit(tmp_path / "disturbed", StopAt(4), epochs=3, every_steps=2))


def test_a_signal_in_the_step_that_stops(tmp_path, received):
    expected = fit(tmp_path / "undisturbed", StopAt(4), epochs=3)
    assert_same(
        expected, fit(tmp_path / "disturbed", StopAt(4), Interrupt("on_train_batch_end", 4, signal.SIGTERM), epochs=3)
    )
    assert_same(expected, fit(tmp_path / "disturbed", StopAt(4), epochs=3))
