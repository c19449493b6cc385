"""FailureRecovery in one process: whatever ends a training, the next `fit` ends as if nothing had happened."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_strategy import stock_mirrored
from training import EPOCHS, STEPS, differences, train

from tfdist.callbacks import CommunicationReport, FailureRecovery
from tfdist.checkpoint import CheckpointError
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


class Interrupted(Exception):
    """What ends a training here."""


class Interrupt(keras.callbacks.Callback):
    """Ends the training when a hook is called for the n-th time, or only sends this process a signal."""

    def __init__(self, hook, count, number=None):
        super().__init__()
        self.hook, self.count, self.number = hook, count, number

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "__dict__").get("hook"):
            return self.called
        return super().__getattribute__(name)

    def on_train_batch_end(self, batch, logs=None):
        """Overridden, so that Keras calls it."""

    def on_test_batch_end(self, batch, logs=None):
        """Overridden, so that Keras calls it."""

    def called(self, *_, **__):
        self.count -= 1
        if self.count == 0:
            if self.number is None:
                raise Interrupted
            os.kill(os.getpid(), self.number)


def mirrored(**arguments):
    return lambda: MirroredStrategy(["CPU:0", "CPU:1"], **arguments)


TRAININGS = {
    "one process": {},
    "arrays": {"kind": "arrays"},
    "unknown cardinality": {"kind": "unknown"},
    "accumulation": {"accumulation": 3},
    "two replicas": {"strategy": mirrored()},
    "two replicas, stock": {"strategy": lambda: stock_mirrored(["CPU:0", "CPU:1"])},
    "two replicas, PowerSGD, accumulation": {"strategy": mirrored(compression="powersgd:2"), "accumulation": 2},
}
INTERRUPTIONS = {
    "first step": ("on_train_batch_end", 1),
    "in the first epoch": ("on_train_batch_end", 5),
    "last step of an epoch": ("on_train_batch_end", STEPS),
    "first step of an epoch": ("on_train_batch_end", STEPS + 1),
    "validation": ("on_test_batch_end", 3),
    "end of an epoch": ("on_epoch_end", 2),
    "last step": ("on_train_batch_end", STEPS * EPOCHS),
    "end of the training": ("on_train_end", 1),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of the trainings that nothing disturbs."""
    results = {}

    def result(name):
        if name not in results:
            results[name] = train(tmp_path_factory.mktemp("undisturbed"), every_epochs=100, **TRAININGS[name])
        return results[name]

    return result


def disturbed(folder, name, *interruptions, **intervals):
    for interruption in interruptions:
        with pytest.raises(Interrupted):
            train(folder, callbacks=[Interrupt(*interruption)], **intervals, **TRAININGS[name])
    return train(folder, **intervals, **TRAININGS[name])


@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_ends_as_if_nothing_had_happened(tmp_path, undisturbed, name):
    # In the first epoch, on its last step, and in the validation of the second.
    result = disturbed(
        tmp_path,
        name,
        ("on_train_batch_end", 5),
        ("on_train_batch_end", 3),
        ("on_test_batch_end", 3),
        every_steps=2,
    )
    assert differences(undisturbed(name), result) == []


@pytest.mark.parametrize("when", INTERRUPTIONS)
def test_every_moment(tmp_path, undisturbed, when):
    result = disturbed(tmp_path, "one process", INTERRUPTIONS[when], every_steps=3)
    assert differences(undisturbed("one process"), result) == []


@pytest.mark.parametrize(
    ("when", "intervals"),
    [("last step of an epoch", {"every_steps": 1}), ("validation", {"every_steps": 1}), ("end of an epoch", {})],
    ids=["last step, every step", "validation, every step", "end of an epoch, every epoch"],
)
def test_other_intervals(tmp_path, undisturbed, when, intervals):
    result = disturbed(tmp_path, "one process", INTERRUPTIONS[when], **intervals)
    assert differences(undisturbed("one process"), result) == []


def test_a_signal_saves_after_the_step_and_ends_with_its_code(tmp_path, undisturbed):
    with pytest.raises(SystemExit) as ending:
        train(tmp_path, callbacks=[Interrupt("on_train_batch_end", 4, signal.SIGTERM)], every_epochs=100)
    assert ending.value.code == 75
    result = train(tmp_path, every_epochs=100)
    assert differences(undisturbed("one process"), result) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_finished_training_trains_nothing(tmp_path, undisturbed):
    train(tmp_path)
    saved = sorted((tmp_path / "checkpoints").iterdir())
    steps = Interrupt("on_train_batch_end", 1)
    assert differences(undisturbed("one process"), train(tmp_path, callbacks=[steps])) == []
    assert steps.count == 1
    assert sorted((tmp_path / "checkpoints").iterdir()) == saved


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 0


def test_a_stopped_training_stays_stopped(tmp_path):
    stopped = train(tmp_path, callbacks=[Stop()])
    assert stopped["epochs"].tolist() == [0]
    assert differences(stopped, train(tmp_path, callbacks=[Stop()])) == []


def test_seconds(tmp_path, undisturbed):
    result = disturbed(tmp_path, "one process", ("on_train_batch_end", 5), every_seconds=1e-6)
    assert differences(undisturbed("one process"), result) == []
    assert len(list((tmp_path / "checkpoints").glob("ckpt-*"))) == 3


@pytest.mark.parametrize(
    "arguments", [{"every_steps": 0}, {"every_steps": 1.5}, {"every_epochs": True}, {"every_seconds": -1}], ids=str
)
def test_intervals_that_are_none(tmp_path, arguments):
    with pytest.raises(ValueError, match="is no interval. Received: every_"):
        FailureRecovery(tmp_path, **arguments)


def test_another_model_is_an_error_before_anything_is_touched(tmp_path):
    def fit(units):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
        model.compile("sgd", loss="mse")
        before = model.get_weights()
        inputs = np.ones([8, 3], "float32"), np.ones([8, units], "float32")
        return model, before, lambda: model.fit(*inputs, verbose=0, callbacks=[FailureRecovery(tmp_path)])

    fit(1)[2]()
    model, before, again = fit(2)
    with pytest.raises(ValueError, match="(?s)Received.*Expected"):
        again()
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))


def test_an_error_of_a_write_is_raised_by_fit(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("tfdist.checkpoint.CheckpointStore.save", fail)
    with pytest.raises(CheckpointError, match="the disk is full"):
        train(tmp_path, every_steps=1)


def test_stock_strategies_of_several_workers_are_refused(monkeypatch):
    # Made without a cluster it has one worker, and no rank that we know.
    with pytest.raises(ValueError, match="does not know the workers"):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", loss="mse")
        model.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0, callbacks=[FailureRecovery("unused")])


def test_the_report_of_communication_goes_on(tmp_path):
    def report(folder, *callbacks):
        reporting = CommunicationReport(print_table=False)
        training = TRAININGS["two replicas, PowerSGD, accumulation"]
        result = train(folder, callbacks=[reporting, *callbacks], every_steps=2, **training)
        return result, reporting.table()

    expected, table = report(tmp_path / "undisturbed")
    with pytest.raises(Interrupted):
        report(tmp_path / "disturbed", Interrupt("on_train_batch_end", 5))
    result, same_table = report(tmp_path / "disturbed")
    assert differences(expected, result) == []
    assert any("bytes" in name for name in result) and same_table == table
