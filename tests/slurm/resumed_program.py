"""Trains on a Slurm; slowly while the test still interrupts it. Arguments: directory, updates before the end."""

import json
import os
import pathlib
import sys
import time

import keras
import numpy as np

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import MultiWorkerMirroredStrategy

directory, epochs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
random = np.random.default_rng(0)
x, y = random.normal(size=(64, 4)).astype("float32"), random.normal(size=(64, 1)).astype("float32")


class Slow(keras.callbacks.Callback):
    """Notes each step, and waits after it until the test has interrupted the training often enough."""

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations.value.numpy())
        if rank == 0:
            with open(directory / "steps", "a") as steps:
                steps.write(f"{os.environ.get('SLURM_JOB_ID')} {os.environ.get('SLURM_RESTART_COUNT', 0)} {step}\n")
        if not (directory / "fast").exists():
            time.sleep(0.2)


strategy = MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
recovery = FailureRecovery(directory / "checkpoints", every_steps=10**6)
history = model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[recovery, Slow()])
if rank == 0:
    np.savez(directory / "result.part.npz", *model.get_weights(), loss=history.history["loss"])
    (directory / "result.part.npz").rename(directory / "result.npz")
