"""Keras' callback list: its order, what callbacks know of it, its wrappers."""

import gc
import pickle
import weakref

import keras
import pytest

from tfdist.keras_internals.keras_callbacks import LastCallback, ListedCallback, wrap_callback_list

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
