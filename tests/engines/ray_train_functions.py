"""The training function that tests give to Ray Train."""

import os
import signal
import time
from pathlib import Path

STEPS_OF_EPOCH, KILLED_AFTER = 8, 11


def train(config):
    """Writes the weights after three epochs, and from which step on this attempt has trained.

    Args:
        config: "directory", "seconds_per_step", and "killed", whether worker 1 is killed once, in the middle.
    """
    import keras
    import numpy as np
    import ray.train

    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import MultiWorkerMirroredStrategy

    directory = Path(config["directory"])

    class Slow(keras.callbacks.Callback):
        is_stateless = True
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            time.sleep(config["seconds_per_step"])
            (directory / f"trains-{strategy.rank}").touch()
            if config["killed"] and strategy.rank == 1 and self.steps == KILLED_AFTER:
                if not (directory / "killed").exists():
                    (directory / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(32 * STEPS_OF_EPOCH, 16)).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((16,)), *layers])
        model.compile("adam", loss="mse")
    slow = Slow()
    report = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ray.train.report(dict(logs)))
    recovery = FailureRecovery(directory / "checkpoints", every_steps=config["every_steps"])
    model.fit(inputs, inputs[:, :1] ** 2, 32, epochs=3, verbose=0, callbacks=[slow, report, recovery])
    if strategy.rank == 0:
        np.savez(directory / "weights.npz", *model.get_weights())
        (directory / "steps").write_text(str(slow.steps))
