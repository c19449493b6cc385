"""Functions that tests of `on_spark` call in workers. As a script, it trains under `tfdist run`."""

import os
import signal
import sys
import time
from pathlib import Path

STEPS_OF_EPOCH, KILLED_AFTER = 8, 11


def train(directory, victim=None):
    """Returns the weights after two epochs, and the number of steps here.

    Args:
        directory: for checkpoints.
        victim: what is killed in the middle, once: the `worker` 1, or the `executor` that it runs beside.
    """
    import keras
    import numpy as np

    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import MultiWorkerMirroredStrategy

    class Killer(keras.callbacks.Callback):
        is_stateless = True
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            killed = Path(directory) / "killed"
            if victim and strategy.rank == 1 and self.steps == KILLED_AFTER and not killed.exists():
                killed.touch()
                os.kill(os.getpid() if victim == "worker" else ancestor(5), signal.SIGKILL)
                time.sleep(60)  # until the launcher ends this process

    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(32 * STEPS_OF_EPOCH, 16)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", loss="mse")
    killer = Killer()
    callbacks = [killer, FailureRecovery(Path(directory) / "checkpoints", every_steps=4)]
    model.fit(inputs, inputs[:, :1] ** 2, batch_size=32, epochs=2, verbose=0, callbacks=callbacks)
    return [np.asarray(weight) for weight in model.get_weights()], killer.steps


def ancestor(generation):
    """The process of a parent: 1 is the launcher, 3 Spark's Python worker, 4 its daemon, 5 the executor."""
    pid = os.getpid()
    for _ in range(generation):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def task_and_threads(scale):
    """What the launcher has set."""
    from tfdist import cluster

    found = cluster.detect()
    print("task", found.task.index, flush=True)
    return found.task.type, scale * found.task.index, os.environ["OMP_NUM_THREADS"]


def fail_in_one(message):
    """Fails in the worker 1."""
    from tfdist import cluster

    if cluster.detect().task.index == 1:
        raise KeyError(message)
    time.sleep(60)


def lose_executor():
    """Kills the executor of worker 1."""
    from tfdist import cluster

    if cluster.detect().task.index == 1:
        os.kill(ancestor(5), signal.SIGKILL)
    time.sleep(60)


def wait_for_signal(directory):
    """Waits for SIGTERM, and has then time to save."""
    from tfdist import cluster

    rank = cluster.detect().task.index
    directory = Path(directory)
    signal.signal(signal.SIGTERM, lambda *_: ((directory / f"saved-{rank}").touch(), sys.exit(75)))
    (directory / f"started-{rank}").touch()
    time.sleep(120)


if __name__ == "__main__":
    import json

    import numpy as np

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    weights, _ = train(sys.argv[1])
    np.savez(Path(sys.argv[1]) / f"{rank}.npz", *weights)
