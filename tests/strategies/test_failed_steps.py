"""Hooks of replicas after a failed step: which exceptions mean that the other workers wait in a step."""

import types

import keras
import pytest
import tensorflow as tf

from tfdist.strategies import replicated_hooks

pytestmark = pytest.mark.usefixtures("cpus")


def raise_missing_file(*_, **__):
    raise tf.errors.NotFoundError(None, None, "no such file")


def in_callback():
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=raise_missing_file)
    keras.callbacks.CallbackList([callback], model=keras.Sequential()).on_train_batch_end(0)


def interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fail", "workers", "is_recorded"),
    [
        (raise_missing_file, 2, True),
        (tf.function(lambda: tf.debugging.assert_equal(tf.zeros([]), 1.0), autograph=False), 2, True),
        (in_callback, 2, False),
        (interrupted, 2, False),
        (raise_missing_file, 1, False),
    ],
)
def test_an_error_of_tensorflow_outside_of_callbacks_is_one_of_a_step(monkeypatch, fail, workers, is_recorded):
    recorded = []
    monkeypatch.setattr(replicated_hooks, "record_failed_step", recorded.append)
    with pytest.raises((tf.errors.OpError, KeyboardInterrupt)) as raised:
        fail()
    replicated_hooks.recover_from(raised.value, [], types.SimpleNamespace(num_workers=workers))
    assert recorded == ([raised.value] if is_recorded else [])
