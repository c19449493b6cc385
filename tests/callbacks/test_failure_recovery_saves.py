"""FailureRecovery in one process: when it saves, what it removes, and errors of writes."""

import re
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruptions import Interrupt, Interrupted, disturbed, names
from small_training import fit
from training import EPOCHS, STEPS, differences, train

from tfdist.callbacks import FailureRecovery
from tfdist.checkpoint import CheckpointError, CheckpointStore

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The result of a training without interruption."""
    return train(tmp_path_factory.mktemp("undisturbed"), every_epochs=100)


def test_a_finished_training_trains_nothing(tmp_path, undisturbed):
    train(tmp_path)
    saved = names(tmp_path)
    assert saved == [f"ckpt-{number:010d}" for number in range(EPOCHS)], "one per epoch, the last at the end"
    steps = Interrupt("on_train_batch_end", 1)
    assert differences(undisturbed, train(tmp_path, callbacks=[steps])) == []
    assert steps.count == 1
    assert names(tmp_path) == saved


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 0


def test_a_stopped_training_stays_stopped(tmp_path):
    stopped = train(tmp_path, callbacks=[Stop()])
    assert stopped["epochs"].tolist() == [0] and names(tmp_path) == ["ckpt-0000000000"]
    assert differences(stopped, train(tmp_path, callbacks=[Stop()])) == []


def test_seconds(tmp_path, undisturbed):
    result = disturbed(tmp_path, ("on_train_batch_end", 5), every_seconds=1e-6)
    assert differences(undisturbed, result) == []
    assert len(list((tmp_path / "checkpoints").glob("ckpt-*"))) == 3


def test_seconds_count_from_the_last_save(tmp_path, monkeypatch):
    now = [0]

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            now[0] += 1

    monkeypatch.setattr("tfdist.recovery.save_schedule.time", types.SimpleNamespace(monotonic=lambda: now[0]))
    train(tmp_path, callbacks=[Clock()], every_seconds=8, keep=100)
    assert len(names(tmp_path)) == STEPS * EPOCHS // 8 + 1, "and one at the end"


def test_a_write_of_an_interrupted_fit_is_waited_for(tmp_path, undisturbed, monkeypatch):
    save, may_write = CheckpointStore.save, threading.Event()

    def late(*arguments, **keywords):
        may_write.wait(120)
        return save(*arguments, **keywords)

    monkeypatch.setattr(CheckpointStore, "save", late)
    with pytest.raises(Interrupted):
        train(tmp_path, callbacks=[Interrupt("on_train_batch_end", 4)], every_steps=3)
    assert names(tmp_path) == []
    threading.Timer(0.3, may_write.set).start()
    steps = Interrupt("on_train_batch_end", 1000)
    assert differences(undisturbed, train(tmp_path, callbacks=[steps], every_steps=3)) == []
    assert 1000 - steps.count == STEPS * EPOCHS - 3


def test_unfinished_saves_of_earlier_attempts_are_removed(tmp_path):
    unfinished = tmp_path / "checkpoints" / ".unfinished-0000000099-0123456789abcdef"
    unfinished.mkdir(parents=True)
    (unfinished / "shared.safetensors").write_bytes(b"incomplete")
    train(tmp_path)
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every_steps", 0),
        ("every_steps", 1.5),
        ("every_epochs", True),
        ("every_seconds", -1),
        ("every_seconds", float("nan")),
        ("keep", 2.5),
        ("keep", True),
        ("peer_timeout_seconds", float("nan")),
    ],
)
def test_invalid_arguments_are_rejected_at_construction(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"Invalid `{name}`. Received: {name}={value}. Expected: a .*number"):
        FailureRecovery(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("intervals", "steps"),
    [
        ({"every_steps": 2}, 4),  # at the next save
        ({"every_steps": 2, "background": False}, 2),  # at once
        ({"every_epochs": 100}, STEPS * EPOCHS),  # at the end
    ],
    ids=str,
)
def test_an_error_of_a_write_is_raised_by_fit(tmp_path, monkeypatch, intervals, steps):
    def fail(*_, **__):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("tfdist.checkpoint.CheckpointStore.save", fail)
    made = Interrupt("on_train_batch_end", 1000)
    with pytest.raises(CheckpointError, match="the disk is full"):
        train(tmp_path, callbacks=[made], **intervals)
    assert 1000 - made.count == steps


@pytest.mark.parametrize(("verbose", "times"), [(2, 1), (0, 0)])
def test_the_cost_of_resuming_is_printed_once(tmp_path, capsys, verbose, times):
    """Three of four batches are skipped."""
    inputs = np.arange(8, dtype="float32")[:, np.newaxis]
    data = tf.data.Dataset.from_tensor_slices((inputs, inputs)).batch(2)

    def fit(*callbacks):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        recovery = FailureRecovery(tmp_path, every_steps=1)
        return model.fit(data, epochs=2, verbose=verbose, callbacks=[recovery, *callbacks])

    with pytest.raises(Interrupted):
        fit(Interrupt("on_train_batch_end", 4))
    assert "returning" not in capsys.readouterr().out, "it has not resumed"
    fit()
    lines = re.findall(
        r"^FailureRecovery: returning to the position in the data took (.*)$", capsys.readouterr().out, re.M
    )
    assert len(lines) == times
    assert all(re.fullmatch(r"\d+\.\d s, for 3 batches", line) for line in lines), lines


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_another_fit_does_not_raise_the_error_of_a_write(tmp_path, monkeypatch, in_a_thread):
    save, may_fail = CheckpointStore.save, threading.Event()

    def fail_first(self, sequence, *arguments, **keywords):
        if self.directory == tmp_path / "outer" and sequence == 0:
            assert may_fail.wait(30)
            raise CheckpointError("the disk is full")
        return save(self, sequence, *arguments, **keywords)

    class Other(keras.callbacks.Callback):
        """Trains another model while the first checkpoint is written."""

        is_stateless = True

        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                threading.Timer(0.5, may_fail.set).start()
                other = threading.Thread(target=fit, args=(tmp_path / "inner",), kwargs={"epochs": 1})
                other.start() if in_a_thread else other.run()
                if in_a_thread:
                    other.join()

    monkeypatch.setattr(CheckpointStore, "save", fail_first)
    with pytest.raises(CheckpointError, match="disk is full"):
        fit(tmp_path / "outer", Other(), every_steps=3, epochs=1)
