"""Kills a worker in the middle of a training that continues without it, and shows that the result does not change.

    python examples/elastic.py

Trains the network of `digits.py` by `tfdist run --workers 3 --elastic 1`. The chief kills itself; the two others
compute its rows of the same step, and train on. The launcher starts it again, and it joins them. The last line compares
the weights with those of one process.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging
from digits import batches, build_model
from digits_dataset import load

from tfdist import cluster
from tfdist.strategies import MultiWorkerMirroredStrategy

_DIRECTORY = flags.DEFINE_string("directory", None, "For workers: directory of the weights.")
_KILL_IN_EPOCH = flags.DEFINE_integer("kill_in_epoch", 3, "In which epoch the chief kills itself; 0 for never.")
_PAUSE_SECONDS = flags.DEFINE_float("pause_seconds", 0.03, "Added to each step, as of a larger network.")
_WORKERS = 3


class Workers(keras.callbacks.Callback):
    """Kills the chief once, and says after each epoch who trains."""

    def __init__(self, strategy: MultiWorkerMirroredStrategy, mark: Path) -> None:
        super().__init__()
        self._strategy, self._mark, self._epoch = strategy, mark, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Counts the epochs, from 1."""
        self._epoch = epoch + 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Kills this process without warning, as a power failure would."""
        time.sleep(_PAUSE_SECONDS.value)
        is_time = self._epoch == _KILL_IN_EPOCH.value and batch == 10
        if is_time and self._strategy.rank == 0 and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Prints the curve, on the first of those who train."""
        living = self._strategy.living_ranks
        if living and self._strategy.rank == living[0]:
            loss = (logs or {}).get("loss", float("nan"))
            print(f"epoch {self._epoch:2}: loss {loss:.6f}, workers {', '.join(map(str, living))}", flush=True)


def train(strategy: tf.distribute.Strategy, callbacks: list[keras.callbacks.Callback]) -> list[np.ndarray]:
    """Trains under a strategy; returns the weights."""
    images, _ = load("digits", flags.FLAGS.data_dir)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(tuple(images.element_spec[0].shape))
    data = batches(images, shuffle=True)
    model.fit(data, epochs=flags.FLAGS.epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


def work() -> None:
    """Trains as a worker, and writes the weights."""
    directory = Path(_DIRECTORY.value or ".")
    strategy = MultiWorkerMirroredStrategy()
    weights = train(strategy, [Workers(strategy, directory / "was_killed")])
    np.savez(directory / f"weights-{strategy.rank}.npz", *weights)


def main(_: list[str]) -> None:
    """Trains as a worker, or starts the workers and compares the result with that of one process."""
    logging.set_verbosity(logging.WARNING)
    if cluster.detect() is not None:
        work()
        return
    expected = train(tf.distribute.get_strategy(), [])
    with tempfile.TemporaryDirectory() as folder:
        names = ("epochs", "kill_in_epoch", "pause_seconds")
        options = [f"--directory={folder}", *(f"--{name}={flags.FLAGS[name].value}" for name in names)]
        options += [f"--data_dir={flags.FLAGS.data_dir}"] if flags.FLAGS.data_dir else []
        launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(_WORKERS), "--elastic", "1"]
        subprocess.run([*launcher, __file__, *options], check=True)
        results = [np.load(path) for path in sorted(Path(folder).glob("weights-*.npz"))]
        differences = [
            float(np.max(np.abs(result[name] - weights)))
            for result in results
            for name, weights in zip(result.files, expected, strict=True)
        ]
        print(
            f"elastic: the chief was killed in epoch {_KILL_IN_EPOCH.value} of {flags.FLAGS.epochs}; "
            f"{len(results)} workers at the end; largest weight difference from one process {max(differences):.0e}"
        )
        if len(results) != _WORKERS or max(differences) > 1e-4:
            raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
