"""The running `fit`, also when callbacks raise, and in custom loops."""

import gc
import weakref

import keras
import numpy as np
import pytest

from tfdist.data_position.resumable_iterator import patch_epoch_iterator
from tfdist.keras_internals.running_fit import running_fit

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(scope="module")
def model(cpus):
    patch_epoch_iterator()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(model, *callbacks):
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0, callbacks=list(callbacks))


class Interrupted(keras.callbacks.Callback):
    def __init__(self, hook, seen):
        super().__init__()
        self.seen = seen
        setattr(self, hook, self._interrupt)

    def _interrupt(self, *arguments, **logs):
        self.seen.append(running_fit(self.model))
        raise KeyboardInterrupt


def test_callback_list_without_a_model_after_an_interrupted_fit(model):
    seen, called = [], []
    with pytest.raises(KeyboardInterrupt):
        fit(model, Interrupted("on_train_batch_end", seen))
    assert seen[0].model is model
    begin, end = (lambda logs: called.append("begin")), (lambda logs: called.append("end"))
    callbacks = keras.callbacks.CallbackList([keras.callbacks.LambdaCallback(on_train_begin=begin, on_train_end=end)])
    callbacks.on_train_begin()
    callbacks.on_train_end()
    assert called == ["begin", "end"]
    fit(model)
    assert running_fit(model) is None


@pytest.mark.parametrize("hook", ["on_train_begin", "on_train_end"])
def test_fit_ends_when_a_callback_raises(model, hook):
    seen, ended = [], []

    class End(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            running_fit(self.model).on_end(lambda: ended.append(hook))

    with pytest.raises(KeyboardInterrupt):
        fit(model, End(), Interrupted(hook, seen))
    assert seen[0].model is model
    assert ended == [hook] and running_fit(model) is None


def test_fit_is_freed_with_what_it_has_called_at_its_end(model):
    """Not by the collector of cycles only: it refers to the model."""
    seen = []

    class End(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            running = running_fit(self.model)
            running.on_end(lambda: seen.append(weakref.ref(running)))

    gc.disable()
    try:
        fit(model, End())
    finally:
        gc.enable()
    assert len(seen) == 1 and seen[0]() is None
