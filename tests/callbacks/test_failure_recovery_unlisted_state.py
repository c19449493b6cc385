"""FailureRecovery restores states that Keras does not list among the variables of a model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from interruptions import Interrupt, Interrupted
from small_training import STEPS, TARGETS, assert_same, fit

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


def recurrent(directory, layer, *callbacks, replicas=1):
    keras.utils.set_random_seed(0)
    with MirroredStrategy([f"CPU:{index}" for index in range(replicas)]).scope():
        layers = [LAYERS[layer](), keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential([keras.Input((5, 3), batch_size=4 // replicas), *layers])
        model.compile("adam", "categorical_crossentropy", jit_compile=False)
    inputs = np.random.default_rng(0).normal(size=(4 * STEPS, 5, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((inputs, TARGETS)).batch(4, drop_remainder=True)
    callbacks = [FailureRecovery(directory, every_steps=2), *callbacks]
    history = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    return history, model.get_weights()


LAYERS = {
    "GRU": lambda: keras.layers.GRU(4, stateful=True),
    "Bidirectional": lambda: keras.layers.Bidirectional(keras.layers.LSTM(2, stateful=True)),
    "stacked cells": lambda: keras.layers.RNN([keras.layers.LSTMCell(3), keras.layers.GRUCell(2)], stateful=True),
}


@pytest.mark.parametrize(
    ("layer", "replicas"),
    [
        ("GRU", 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("GRU", 1), ("Bidirectional", 1), ("Bidirectional", 2))
        ),
        *(pytest.param("stacked cells", count, marks=pytest.mark.long) for count in (1, 2)),
    ],
)
def test_states_of_stateful_layers(tmp_path, layer, replicas):
    with pytest.raises(Interrupted):
        recurrent(tmp_path / "disturbed", layer, Interrupt("on_train_batch_end", 3), replicas=replicas)
    undisturbed = recurrent(tmp_path / "undisturbed", layer, replicas=replicas)
    assert_same(undisturbed, recurrent(tmp_path / "disturbed", layer, replicas=replicas))


class Own(keras.Model):
    """Keeps an optimizer in a list or a dictionary, or a `tf.Variable`."""

    def __init__(self, kind):
        super().__init__()
        self.dense = keras.layers.Dense(3, activation="softmax")
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        self.others = {"list": [optimizer], "dict": {"generator": [optimizer]}}.get(kind)
        self.count = tf.Variable(1.0) if kind == "tf.Variable" else None

    def build(self, shape):
        self.dense.build(shape)
        if self.others:
            self.own_optimizer().build(self.dense.trainable_variables)

    def own_optimizer(self):
        return (self.others["generator"] if isinstance(self.others, dict) else self.others)[0]

    def call(self, inputs, training=False):
        return self.dense(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
        weights = self.dense.trainable_variables
        gradients = tape.gradient(loss, weights)
        if self.others:
            self.own_optimizer().apply(gradients, weights)
        else:
            self.count.assign_add(1.0)
            self.optimizer.apply([gradient / self.count for gradient in gradients], weights)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [pytest.param("list", marks=pytest.mark.long), "dict", "tf.Variable"])
def test_states_in_attributes_of_a_model(tmp_path, kind):
    def model():
        keras.utils.set_random_seed(0)
        made = Own(kind)
        made.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", jit_compile=False)
        made.build((None, 3))
        return made

    with pytest.raises(Interrupted):
        fit(tmp_path / "disturbed", Interrupt("on_train_batch_end", 5), model=model(), every_steps=2)
    undisturbed = fit(tmp_path / "undisturbed", model=model(), every_steps=2)
    assert_same(undisturbed, fit(tmp_path / "disturbed", model=model(), every_steps=2))


def test_best_weights_of_bfloat16(tmp_path):
    def train(directory, *callbacks):
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(3, activation="softmax", dtype="bfloat16")
        model = keras.Sequential([keras.Input((3,)), dense])
        model.compile(keras.optimizers.SGD(-0.1), "categorical_crossentropy", jit_compile=False)  # the loss increases
        stopping = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
        return fit(directory, stopping, *callbacks, model=model, epochs=4, every_steps=2)

    with pytest.raises(Interrupted):
        train(tmp_path / "disturbed", Interrupt("on_train_batch_end", STEPS + 3))
    assert_same(train(tmp_path / "undisturbed"), train(tmp_path / "disturbed"))
