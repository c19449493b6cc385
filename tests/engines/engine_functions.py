"""Functions that tests of engines call in workers. As a script, it trains under `tfdist run`."""

import os
import signal
import sys
import time
from pathlib import Path

STEPS_OF_EPOCH, KILLED_AFTER = 8, 11


def train(directory, victim=None, data=None, compression=None):
    """Returns the weights after two epochs, and the number of steps here.

    Args:
        directory: for checkpoints.
        data: of `from_dask`, with columns `x` and `y`; None: arrays.
        compression: of the strategy.
        victim: what is killed in the middle, once: an ancestor of worker 1 (see `ancestor`), 0 for itself.
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
            if victim is not None and strategy.rank == 1 and self.steps == KILLED_AFTER and not killed.exists():
                killed.touch()
                os.kill(ancestor(victim), signal.SIGKILL)
                time.sleep(60)  # until the launcher ends this process

    strategy = MultiWorkerMirroredStrategy(compression=compression)
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(32 * STEPS_OF_EPOCH, 16)).astype("float32")
    with strategy.scope():
        features = 16 if data is None else 1
        model = keras.Sequential([keras.Input((features,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", loss="mse")
    killer = Killer()
    callbacks = [killer, FailureRecovery(Path(directory) / "checkpoints", every_steps=4)]
    if data is None:
        model.fit(inputs, inputs[:, :1] ** 2, batch_size=32, epochs=2, verbose=0, callbacks=callbacks)
    else:
        batches = data.dataset(32, features=["x"], label="y", shuffle=True, seed=0)
        model.fit(batches, epochs=2, verbose=0, callbacks=callbacks)
    return [np.asarray(weight) for weight in model.get_weights()], killer.steps


def train_elastically(directory, victim=None, generation=0):
    """Returns the weights, and the ranks that trained together in turn, with two workers.

    Args:
        directory: for the file that says that something was killed.
        victim: the rank of which an ancestor is killed, once; None: nobody. The other makes slow steps until it is
            back.
        generation: which ancestor: see `ancestor`.
    """
    import keras
    import numpy as np

    from tfdist.strategies import MultiWorkerMirroredStrategy

    killed, until = Path(directory) / "killed", time.monotonic() + 150

    class Killer(keras.callbacks.Callback):
        living = ()

        def on_train_batch_end(self, batch, logs=None):
            ranks = strategy.living_ranks
            if self.living[-1:] != (ranks,):
                self.living = (*self.living, ranks)
            if victim is None or time.monotonic() > until:
                return
            if strategy.rank == victim and not killed.exists():
                killed.touch()
                os.kill(ancestor(generation), signal.SIGKILL)
                time.sleep(60)  # until it is killed, too
            if len(ranks) < 2:
                time.sleep(0.5)

    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    inputs = np.random.default_rng(0).normal(size=(32 * STEPS_OF_EPOCH, 16)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    killer = Killer()
    model.fit(inputs, inputs[:, :1] ** 2, batch_size=32, epochs=32, verbose=0, callbacks=[killer])
    return [np.asarray(weight) for weight in model.get_weights()], killer.living


def train_with_servers():
    """Returns the weights after two epochs of synchronous rounds."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.strategies import ParameterServerStrategy, Synchronous

    strategy = ParameterServerStrategy(mode=Synchronous())
    keras.utils.set_random_seed(0)
    inputs = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
        model.compile("adam", loss="mse")
    batches = tf.data.Dataset.from_tensor_slices((inputs, inputs[:, :1] ** 2)).batch(16)
    model.fit(batches, epochs=2, verbose=0)
    return [np.asarray(weight) for weight in model.get_weights()]


def train_in_stages():
    """Returns the weights of a model in two stages, after an epoch."""
    import keras
    import numpy as np

    from tfdist.strategies import ModelParallelStrategy, Pipeline

    strategy = ModelParallelStrategy(pipeline=Pipeline(stages=2, micro_batches=2))
    keras.utils.set_random_seed(0)
    inputs = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    with strategy.scope():
        layers = [keras.Input((16,)), *(keras.layers.Dense(16, "tanh") for _ in range(3)), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", loss="mse")
    model.fit(inputs, inputs[:, :1] ** 2, batch_size=16, epochs=1, verbose=0)
    return [np.asarray(weight) for weight in model.get_weights()]


def ancestor(generation):
    """The process of an ancestor: 0 is this one, 1 the launcher, 2 what forwards signals to it, 3 the engine's."""
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


def lose_place(generation):
    """Kills an ancestor of worker 1."""
    from tfdist import cluster

    if cluster.detect().task.index == 1:
        os.kill(ancestor(generation), signal.SIGKILL)
    time.sleep(60)


def lose_first_place_once(generation, killed):
    """Kills an ancestor of worker 0, where the rendezvous is, unless there is a file; then returns the rank."""
    from tfdist import cluster

    rank = cluster.detect().task.index
    if not Path(killed).exists():
        if rank == 0:
            Path(killed).touch()
            os.kill(ancestor(generation), signal.SIGKILL)
        time.sleep(60)
    return rank


def wait_for_signal(directory):
    """Waits for SIGTERM, and has then time to save."""
    from tfdist import cluster

    rank = cluster.detect().task.index
    directory = Path(directory)
    signal.signal(signal.SIGTERM, lambda *_: ((directory / f"saved-{rank}").touch(), sys.exit(75)))
    (directory / f"started-{rank}").touch()
    time.sleep(120)


def sleep(seconds):
    """Returns its argument after so many seconds."""
    time.sleep(seconds)
    return seconds


def call_in_task(workers):
    """Calls `on_dask` from a task of Dask."""
    from tfdist.launch import on_dask

    return on_dask(task_and_threads, 1, workers=workers, start_timeout_seconds=60)


if __name__ == "__main__":
    import json

    import numpy as np

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    is_served = "ps" in json.loads(os.environ["TF_CONFIG"])["cluster"]
    if task["type"] == "chief":
        weights = train_with_servers() if is_served else train_in_stages()
    else:
        weights = train(sys.argv[1], compression=(sys.argv[2:] or [None])[0])[0]
    np.savez(Path(sys.argv[1]) / f"{task['type']}-{task['index']}.npz", *weights)
