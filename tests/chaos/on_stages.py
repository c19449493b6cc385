"""A training in two stages on the workers of `tfdist run --chief`, or on devices of this process.

on_stages.py FOLDER EPOCHS SECONDS    writes FOLDER/state.npz; each step takes SECONDS longer until FOLDER/struck exists
"""

import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import ModelParallelStrategy, Pipeline

SAMPLES, BATCH, SAVED_EVERY = 44, 8, 3
STEPS = -(-SAMPLES // BATCH)  # of an epoch


class Pause(keras.callbacks.Callback):
    """Writes the number of steps of this process, and waits."""

    is_stateless = True

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__()
        self.path, self.seconds, self.steps = path, seconds, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.path.write_text(str(self.steps))
        if not self.path.with_name("struck").exists():
            time.sleep(self.seconds)


def trained(folder: Path, epochs: int, seconds: float, devices: list[str] | None = None) -> dict[str, np.ndarray]:
    """Returns the state of model and optimizer after a training with dropout, normalization and moving averages."""
    keras.utils.set_random_seed(3)
    strategy = ModelParallelStrategy(devices, pipeline=Pipeline(stages=2, micro_batches=3, cuts=["second"]))
    with strategy.scope():
        first = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)]
        second = [keras.layers.Dense(16, "tanh", name="second"), keras.layers.Dropout(0.1, seed=2)]
        model = keras.Sequential([keras.Input((12,)), *first, *second, keras.layers.Dense(12)])
        optimizer = keras.optimizers.Adam(1e-2, use_ema=True, global_clipnorm=1.0)
        model.compile(optimizer, "mse", metrics=["mae"])
    x, y = np.random.default_rng(0).normal(size=(2, SAMPLES, 12)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=2).batch(BATCH)
    recovery = FailureRecovery(folder / "checkpoints", every_steps=SAVED_EVERY)
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=[recovery, Pause(folder / "steps", seconds)]).history
    state = {f"{index}": variable.numpy() for index, variable in enumerate([*model.variables, *optimizer.variables])}
    return state | {f"history of {name}": np.array(values) for name, values in history.items()}


if __name__ == "__main__":
    here = Path(sys.argv[1])
    np.savez(here / "state.npz", **trained(here, int(sys.argv[2]), float(sys.argv[3])))
