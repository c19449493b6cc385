"""Whether `fit` has created a list of callbacks, or a call that a callback of `fit` makes."""

import keras
import numpy as np
import pytest

from tfdist.keras_internals.call_frames import is_within_call_of_fit

pytestmark = pytest.mark.usefixtures("cpus")


class Evaluates(keras.callbacks.Callback):
    def __init__(self, x):
        super().__init__()
        self._x = x

    def on_epoch_end(self, epoch, logs=None):
        self.model.evaluate(self._x, self._x, verbose=0)
        self.model.predict(self._x, verbose=0)


def test_only_the_list_of_fit_itself_is_of_fit(monkeypatch):
    stock, found = keras.callbacks.CallbackList.__init__, []

    def create(self, *args, model=None, **kwargs):
        found.append(is_within_call_of_fit(model))
        stock(self, *args, model=model, **kwargs)

    monkeypatch.setattr(keras.callbacks.CallbackList, "__init__", create)
    x = np.ones((4, 1), np.float32)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x, verbose=0, callbacks=[Evaluates(x)])
    model.evaluate(x, x, verbose=0)
    assert found == [True, False, False, False]
