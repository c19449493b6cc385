"""Models and callbacks of tests of the estimator, which workers import."""

import os
import signal
from pathlib import Path


def build(learning_rate=0.1, units=8):
    """A compiled model of four features."""
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(learning_rate), loss="mse", weighted_metrics=["mae"])
    return model


def build_with_two_heads():
    """A model that is not compiled, of an image and a number, with a class and a number."""
    import keras

    image, number = keras.Input((2, 2, 1), name="image"), keras.Input((1,), name="number")
    hidden = keras.layers.Concatenate()([keras.layers.Flatten()(image), number])
    kind = keras.layers.Dense(3, "softmax", name="kind")(hidden)
    return keras.Model([image, number], [kind, keras.layers.Dense(1, name="size")(hidden)])


def build_wrongly():
    """Fails in each worker."""
    raise KeyError("no such layer")


def killer(path):
    """Returns callbacks that kill worker 1 in the third step, once."""
    import keras

    class Killer(keras.callbacks.Callback):
        is_stateless = True
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.model.distribute_strategy.rank == 1 and self.steps == 3 and not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    return [Killer()]


def waiting(path):
    """Returns callbacks that stay in the first step."""
    import time

    import keras

    class Waiting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            Path(path).touch()
            time.sleep(120)

    return [Waiting()]
