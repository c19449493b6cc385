"""Keras' callback list: its order, what callbacks know of it, its wrappers."""

import functools
import gc
import pickle
import weakref

import keras
import pytest

from tfdist.callbacks import WorkerReport
from tfdist.keras_internals.keras_callbacks import (
    LastCallback,
    ListedCallback,
    has_own_code_before_steps,
    wrap_callback_list,
)

pytestmark = pytest.mark.usefixtures("cpus")


def train(*callbacks):
    listed = keras.callbacks.CallbackList(list(callbacks))
    listed.on_train_begin()
    listed.on_train_end()


def test_last_callbacks_are_called_last_and_all_know_the_order():
    called = []

    class Noted(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            called.append(self)

    class First(Noted, ListedCallback):
        pass

    class Last(Noted, LastCallback):
        pass

    first, last, plain = First(), Last(), Noted()
    assert first.neighbours == last.neighbours == ()
    train(last, plain, first)
    assert called == [plain, first, last]
    assert first.neighbours == last.neighbours == (plain, first, last)
    assert last.others == (plain, first)
    train(first)
    assert first.neighbours == (first,)


class _SetsState(keras.callbacks.Callback):
    def set_state(self, state):
        self.model.rate = state


class _BeginsBatches(keras.callbacks.Callback):
    def on_batch_begin(self, batch, logs=None):
        self.model.rate = 0.5


def test_code_of_the_program_that_runs_before_steps_is_found(tmp_path):
    of_keras = [keras.callbacks.ModelCheckpoint(tmp_path / "model.keras"), keras.callbacks.TensorBoard(tmp_path)]
    of_keras += [keras.callbacks.EarlyStopping(), keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)]
    assert not any(map(has_own_code_before_steps, [*of_keras, WorkerReport()]))
    begins_epochs = keras.callbacks.LambdaCallback(on_epoch_begin=functools.partial(print, end=""))
    assert all(map(has_own_code_before_steps, [begins_epochs, _SetsState(), _BeginsBatches()]))


def test_wrappers_are_called_once_around_a_method(unpatched):
    stock = keras.callbacks.CallbackList
    called = []
    listed = stock([keras.callbacks.LambdaCallback(on_predict_begin=lambda logs: called.append(logs))])

    def inner(call, callbacks, logs=None):
        called.append("inner")
        call(logs)

    def outer(call, callbacks, logs=None):
        assert callbacks is listed
        called.append("outer")
        call({"logs": 1})

    for wrapper in (inner, outer, inner):
        wrap_callback_list("on_predict_begin", wrapper)
    listed.on_predict_begin()
    assert called == ["outer", "inner", {"logs": 1}]


def test_a_callback_is_freed_without_the_garbage_collector():
    """FailureRecovery holds a copy of all variables, and a program may train with a new one for every fold."""
    gc.disable()
    try:
        last = LastCallback()
        train(last)
        assert last.neighbours == (last,)
        assert pickle.loads(pickle.dumps(last)).neighbours == ()
        reference = weakref.ref(last)
        del last
        assert reference() is None
    finally:
        gc.enable()
