"""The program of one worker: trains a linear model on Parquet files, and writes what it has read and learned."""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery
from tfdist.data import from_parquet
from tfdist.data.parquet_files import ParquetSource
from tfdist.strategies import MultiWorkerMirroredStrategy

RATE = 0.05
EPOCHS = 2


class Linear(keras.Model):
    """A linear model without a bias, which records the ids of the rows of each of its steps."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        self.seen = []

    def call(self, inputs):
        return self.layer(inputs["x"])

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        tf.numpy_function(lambda ids: self.seen.extend(ids.tolist()), [x["id"]], [])
        return super().train_step((x, y, weight) if weight is not None else (x, y))


class Steps(keras.callbacks.Callback):
    """Collects the ids of each step in a file, and kills this worker after a number of steps."""

    is_stateless = True

    def __init__(self, file, kill_after):
        super().__init__()
        self._file, self._kill_after, self._steps = file, kill_after, 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.model.seen.clear()

    def on_train_batch_end(self, batch, logs=None):
        with self._file.open("a") as file:
            print(json.dumps([self._epoch, batch, sorted(self.model.seen)]), file=file)
        self._steps += 1
        if self._steps == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def count_blocks(read):
    """Records which blocks this process reads."""
    stock = ParquetSource.read

    def recording(self, block, columns):
        read.add(block)
        return stock(self, block, columns)

    ParquetSource.read = recording


def main(folder, parquet, case, options):
    """Trains one case."""
    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(3)
    read = set()
    count_blocks(read)
    data = from_parquet(options.get("url", parquet))
    given = {"features": {"x": ["a", "b"], "id": "id"}, "label": "y", **options["dataset"]}
    dataset = data.dataset(**given)
    with strategy.scope():
        model = Linear()
        model.compile(keras.optimizers.SGD(RATE), "mse")
    name = f"{case}-{strategy.rank}-{os.environ['TFDIST_ATTEMPT']}"
    attempt = int(os.environ["TFDIST_ATTEMPT"])
    faults = options.get("faults", [])
    rank, after = faults[attempt] if attempt < len(faults) else (None, None)
    kill_after = after if rank == strategy.rank else None
    if kill_after == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    # Before the step is saved: every step that a checkpoint has is in the files of all workers.
    callbacks = [Steps(folder / f"{name}.jsonl", kill_after)]
    if "recover" in options:
        callbacks.append(FailureRecovery(folder / f"{case}-checkpoints", every_steps=1, background=False))
    history = model.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    loss = history.history.get("loss", [])
    np.savez(folder / f"{name}.npz", kernel=model.layer.kernel.numpy(), loss=loss)
    if strategy.rank == 0:
        (folder / f"{case}-finished").touch()
    (folder / f"{name}.json").write_text(json.dumps({"blocks": sorted(read), "workers": strategy.num_workers}))


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[3]).read_text())
    for wanted in sys.argv[4].split(","):
        # A restart repeats only the case that was interrupted: all workers have finished the earlier ones.
        if (Path(sys.argv[1]) / f"{wanted}-finished").exists():
            continue
        main(Path(sys.argv[1]), sys.argv[2], wanted, cases[wanted])
