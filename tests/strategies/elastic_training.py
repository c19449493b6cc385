"""The training that is interrupted and resumed with another number of replicas."""

import elastic_programs
import keras
import tensorflow as tf

from tfdist.callbacks import FailureRecovery


class Fault(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("on purpose")


def train(strategy, checkpoints, callbacks=(), *, plain=False, accumulation_steps=None):
    """Six epochs of three steps, with a last batch that is smaller."""
    with strategy.scope():
        model = elastic_programs.plain_network() if plain else elastic_programs.network(own=False)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5, gradient_accumulation_steps=accumulation_steps)
        model.compile(optimizer, loss, metrics=["accuracy"])
    rows = elastic_programs.INPUTS, elastic_programs.LABELS
    data = tf.data.Dataset.from_tensor_slices(rows).shuffle(elastic_programs.ROWS, seed=3).batch(16)
    recovery = FailureRecovery(checkpoints, every_steps=1)
    history = model.fit(data, epochs=6, verbose=0, callbacks=[recovery, *callbacks])
    logs = [history.history[name] for name in sorted(history.history)]
    return {"weights": model.get_weights(), "logs": logs, "iterations": [int(model.optimizer.iterations.numpy())]}
