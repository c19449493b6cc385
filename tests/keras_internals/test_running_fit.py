"""The running `fit`, where callbacks are called by loops of the user's own."""

import keras
import numpy as np
import pytest

from tfdist.keras_internals.resumable_iterator import install_resumable_iterator
from tfdist.keras_internals.running_fit import running_fit

pytestmark = pytest.mark.usefixtures("cpus")


class Interrupted(keras.callbacks.Callback):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(running_fit(self.model))
        raise KeyboardInterrupt


def test_a_list_of_callbacks_without_a_model_is_called_behind_an_interrupted_fit():
    install_resumable_iterator()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    seen, called = [], []
    with pytest.raises(KeyboardInterrupt):
        model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0, callbacks=[Interrupted(seen)])
    assert seen[0].model is model
    begin, end = (lambda logs: called.append("begin")), (lambda logs: called.append("end"))
    callbacks = keras.callbacks.CallbackList([keras.callbacks.LambdaCallback(on_train_begin=begin, on_train_end=end)])
    callbacks.on_train_begin()
    callbacks.on_train_end()
    assert called == ["begin", "end"]
    model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0)
    assert running_fit(model) is None
