"""Callbacks of an interrupted training end with the state of an uninterrupted one."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.recovery.callback_state import (
    callbacks_without_state,
    check_callbacks,
    reject_backup_and_restore,
    restore_callbacks,
    save_callbacks,
)

pytestmark = pytest.mark.usefixtures("cpus")
known = keras.callbacks
# The loss falls, rises, rests on a plateau, falls below, rises again.
LOSSES = [5.0, 4.0, 4.5, 4.2, 4.1, 3.0, 3.5, 3.6, 3.7, 3.8, 3.9, 4.0]
EPOCHS, BATCHES = len(LOSSES), 5
END = (EPOCHS, 0)
# Where it is saved, and where it is killed: an epoch and its first batch.
INTERRUPTIONS = [((3, 0), (5, 0)), ((4, 3), (4, 4)), ((4, 3), (7, 1)), ((7, 0), (7, 0)), ((8, 1), (9, 2))]


class Training:
    """A training with the losses above, whose weights contain the epoch. `run` continues from its last step."""

    def __init__(self, callbacks, state=None):
        self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        self.model.compile(keras.optimizers.SGD(0.5), loss="mse")
        self.list = known.CallbackList(callbacks, add_history=True, model=self.model, epochs=EPOCHS, steps=BATCHES)
        self.place, self.model.stop_training = (0, 0), False
        self.list.on_train_begin()
        if state is not None:
            self.place, weights, rate, values, tensors = state
            check_callbacks(self.callbacks, values)
            restore_callbacks(self.callbacks, values, tensors)
            self.model.set_weights(weights)
            self.model.optimizer.learning_rate = rate

    @property
    def callbacks(self):
        return self.list.callbacks

    @property
    def rate(self):
        return float(self.model.optimizer.learning_rate.numpy())

    def state(self):
        state = save_callbacks(self.callbacks)
        values = json.loads(json.dumps(state.values, allow_nan=False))
        return self.place, self.model.get_weights(), self.rate, values, state.tensors

    def run(self, until=END):
        while self.place < until and not self.model.stop_training:
            epoch, batch = self.place
            self.list.on_epoch_begin(epoch)
            for batch in range(batch, BATCHES):  # noqa: B020
                self.list.on_train_batch_begin(batch)
                self.model.set_weights([np.full((2, 1), epoch + batch / 10), np.zeros(1)])
                self.list.on_train_batch_end(batch, {"loss": LOSSES[epoch]})
                self.place = epoch, batch + 1
                if self.place >= until:
                    return self
            logs = {"loss": LOSSES[epoch], "extra": float("nan") if epoch == 2 else 0.1 * epoch}
            self.list.on_epoch_end(epoch, logs)
            self.place = epoch + 1, 0
        return self

    def end(self):
        self.list.on_train_end()
        return self


def trained(make, interruption):
    """The undisturbed training, and the one that was interrupted, at their ends."""
    keras.backend.clear_session()
    undisturbed = Training(make("undisturbed")).run().end()
    save_at, kill_at = interruption
    first = Training(make("interrupted")).run(save_at)
    state = first.state()
    first.run(kill_at)
    for logger in first.callbacks:
        if isinstance(logger, known.CSVLogger):
            logger.csv_file.close()  # as the end of a process does
    return undisturbed, Training(make("interrupted"), state).run().end()


def attributes(callback, *names):
    return [getattr(callback, name) for name in names]


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_early_stopping_stops_at_the_same_epoch_with_the_same_weights(interruption):
    def make(_):
        return [known.EarlyStopping("loss", patience=5, min_delta=0.05, restore_best_weights=True)]

    one, other = trained(make, interruption)
    assert other.place == one.place == (11, 0)
    names = ("best", "wait", "stopped_epoch", "best_epoch", "min_delta")
    assert attributes(other.callbacks[0], *names) == attributes(one.callbacks[0], *names)
    np.testing.assert_array_equal(other.model.get_weights()[0], np.full((2, 1), 5.4, "float32"))


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_the_rate_is_reduced_at_the_same_epochs(interruption):
    def make(_):
        return [known.ReduceLROnPlateau("loss", patience=2, cooldown=2, factor=0.5)]

    one, other = trained(make, interruption)
    rates = [training.callbacks[-1].history["learning_rate"] for training in (one, other)]
    assert rates[0] == rates[1] and len(set(rates[0])) > 2


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
@pytest.mark.parametrize(
    "options", [{"save_best_only": True}, {"save_freq": 7}, {"save_best_only": True, "save_freq": 7}], ids=str
)
def test_models_are_saved_at_the_same_places(options, interruption, tmp_path, monkeypatch):
    def make(name):
        path = tmp_path / name / "{epoch}.weights.h5"
        return [known.ModelCheckpoint(path, monitor="loss", save_weights_only=True, **options)]

    # What is written is the weights' value; no file format is tested here.
    monkeypatch.setattr(
        keras.Model, "save_weights", lambda self, path, **_: Path(path).write_text(str(self.get_weights()[0][0, 0]))
    )
    one, other = trained(make, interruption)
    files = [
        {file.name: file.read_text() for file in (tmp_path / name).iterdir()} for name in ("undisturbed", "interrupted")
    ]
    assert files[0] == files[1] and len(files[0]) > 1
    assert other.callbacks[0].best == one.callbacks[0].best


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_a_log_has_every_line_once_and_one_header(append, interruption, tmp_path):
    for name in ("undisturbed", "interrupted") if append else ():
        (tmp_path / name).write_bytes("epoch,extra,loss,val_extra,val_loss\r\n0,é,1,NA,NA\r\n".encode())

    def make(name):
        return [known.CSVLogger(tmp_path / name, append=append)]

    trained(make, interruption)
    log = (tmp_path / "interrupted").read_bytes()
    assert log == (tmp_path / "undisturbed").read_bytes()
    assert log.count(b"\n") == 1 + EPOCHS + append and log.count(b"epoch") == 1


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_the_history_is_that_of_the_undisturbed_run(interruption):
    one, other = trained(lambda _: [known.TerminateOnNaN()], interruption)
    histories = [training.model.history for training in (one, other)]
    assert histories[1].epoch == histories[0].epoch == list(range(EPOCHS))
    assert list(histories[1].history) == list(histories[0].history) == ["extra", "loss"]
    np.testing.assert_equal(histories[1].history, histories[0].history)


def test_tensorboard_resumes_counting(tmp_path):
    def make(name):
        return [known.TensorBoard(tmp_path / name, update_freq=1, write_graph=False)]

    one, other = trained(make, ((4, 3), (7, 1)))
    assert attributes(other.callbacks[0], "_global_train_batch") == [EPOCHS * BATCHES]
    assert attributes(one.callbacks[0], "_global_train_batch") == [EPOCHS * BATCHES]


def test_swapped_weights_are_known_to_be_swapped():
    swap = known.SwapEMAWeights(swap_on_epoch=True)
    swap._ema_weights_in_model = True
    other = known.SwapEMAWeights(swap_on_epoch=True)
    restore_callbacks([other], save_callbacks([swap]).values, {})
    assert other._ema_weights_in_model


class Counter(known.Callback):
    """A callback of the user's own."""

    def __init__(self, start=0):
        super().__init__()
        self.seen, self.best = start, np.zeros(3)

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        self.best = self.best + batch

    def get_state(self):
        return {"seen": self.seen, "best": self.best}

    def set_state(self, state):
        self.seen, self.best = state["seen"], state["best"]


class StoppingCounter(Counter, known.EarlyStopping):
    """A known callback with a state of its own."""

    def __init__(self):
        known.EarlyStopping.__init__(self, "loss", patience=100)
        self.seen = 0

    def get_state(self):
        return {"seen": self.seen, "best": 0}

    def set_state(self, state):
        self.seen = state["seen"]

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1


def test_callbacks_of_the_users_own_are_matched_by_class_and_order():
    one, other = trained(
        lambda _: [Counter(), StoppingCounter(), known.LambdaCallback(), Counter(50)], ((4, 3), (7, 1))
    )
    for number in (0, 1, 3):
        assert other.callbacks[number].seen == one.callbacks[number].seen == EPOCHS * BATCHES + 50 * (number == 3)
    np.testing.assert_array_equal(other.callbacks[0].best, one.callbacks[0].best)
    assert other.callbacks[1].wait == one.callbacks[1].wait == 6


def test_callbacks_that_remember_nothing_may_come_and_go():
    state = Training([known.TerminateOnNaN(), Counter()]).run((1, 0)).state()
    Training([Counter(), known.LearningRateScheduler(lambda epoch, rate: rate)], state)


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ([], "Received: 1 of class Counter in the checkpoint. Expected: 0, as in this program"),
        ([Counter(), Counter()], "Received: 1 of class Counter in the checkpoint. Expected: 2"),
        ([Counter(), known.EarlyStopping()], "Received: 0 of class EarlyStopping in the checkpoint. Expected: 1"),
    ],
)
def test_a_changed_list_is_refused(now, message):
    state = Training([Counter()]).run((1, 0)).state()
    with pytest.raises(ValueError, match=f"list of callbacks has changed. {message}.*another directory"):
        Training(now, state)


def test_a_rank_that_is_new_need_not_have_the_callbacks_of_the_chief():
    values = Training([Counter(), known.EarlyStopping("loss")]).run((1, 0)).state()[3]
    callbacks = [Counter(), known.History()]
    check_callbacks(callbacks, values, all_present=False)
    restore_callbacks(callbacks, values, {"callbacks/Counter/0/state/best": np.full(3, 4.0)})
    assert callbacks[0].seen == BATCHES and callbacks[1].epoch == [0]
    with pytest.raises(ValueError, match="0 of class ReduceLROnPlateau in the checkpoint"):
        check_callbacks([*callbacks, known.ReduceLROnPlateau()], values, all_present=False)


def test_arrays_are_tensors_of_all_ranks():
    training = Training([known.EarlyStopping("loss", restore_best_weights=True)]).run((1, 0))
    state = save_callbacks(training.callbacks)
    assert [name.rpartition("/")[0] for name in state.tensors] == ["callbacks/EarlyStopping/0/best_weights"] * 2


def test_backup_and_restore_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"BackupAndRestore cannot be combined with FailureRecovery"):
        reject_backup_and_restore([known.History(), known.BackupAndRestore(tmp_path)])
    reject_backup_and_restore([known.History()])


def test_callbacks_that_lose_their_state_are_named():
    class Unknown(known.Callback):
        pass

    class Declared(known.Callback):
        is_stateless = True

    others = [Counter(), known.CSVLogger("log"), known.TerminateOnNaN(), Declared()]
    lost = callbacks_without_state([Unknown(), *others, Unknown()])
    assert [name.rpartition(".")[2] for name in lost] == ["Unknown"]


def test_what_a_callback_cannot_save_is_named():
    counter = Counter()
    counter.seen = object()
    with pytest.raises(ValueError, match="'callbacks/Counter/0/state/seen' cannot be saved"):
        save_callbacks([counter])


def test_a_best_value_that_is_a_tensor_comes_back_as_a_number():
    stopping, other = (known.EarlyStopping("loss") for _ in range(2))
    stopping.on_train_begin()
    stopping.best = tf.constant(0.25)
    state = save_callbacks([stopping])
    restore_callbacks([other], state.values, state.tensors)
    assert other.best == np.float32(0.25)
