"""Models that were trained and deleted leave no graphs of their steps behind."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import LocalSGD, MirroredStrategy, MultiWorkerMirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


def graphs_of_steps():
    gc.collect()
    return sum(type(each).__name__ == "FuncGraph" and "one_step" in each.name for each in gc.get_objects())


def test_graphs_end_with_their_model():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def trained():
        with strategy.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
            model.compile("sgd", "mse", jit_compile=False)
        data = np.ones([4, 3], "float32"), np.ones([4, 2], "float32")
        model.fit(*data, batch_size=4, verbose=0)
        model.evaluate(*data, batch_size=4, verbose=0)
        model.predict(data[0], batch_size=4, verbose=0)
        return model

    before = graphs_of_steps()
    model = trained()
    assert graphs_of_steps() > before
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert graphs_of_steps() == before


def test_models_of_local_updates_and_their_strategy_end():
    """Functions that make weights and batch statistics equal are kept for each model, and traced with gradients."""
    strategy = MultiWorkerMirroredStrategy(mode=LocalSGD(sync_every=2))
    with strategy.scope():
        layers = [keras.Input([3]), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(use_ema=True), "mse", jit_compile=False)
    model.fit(np.ones([8, 3], "float32"), np.ones([8, 2], "float32"), batch_size=4, verbose=0)
    references = [weakref.ref(model), weakref.ref(strategy)]
    del model, layers, strategy
    keras.utils.clear_session()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_custom_gradients_of_others_are_kept():
    custom = tf.custom_gradient(lambda x: (x * x, lambda upstream: upstream * 7.0))
    outer = tf.function(lambda x: custom(x))
    x = tf.Variable(3.0)
    outer(x)
    test_graphs_end_with_their_model()
    with tf.GradientTape() as tape:
        y = outer(x)
    assert float(tape.gradient(y, x)) == 7.0
