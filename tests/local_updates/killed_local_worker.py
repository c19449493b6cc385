"""The program of `test_killed_local_worker.py`: rank 1 is killed, or frozen, between two exchanges.

Its arguments are the folder and the signal that rank 1 sends itself in the first attempt; 0 for none.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import local_models
import numpy as np

from tfdist.callbacks import FailureRecovery
from tfdist.compression import Policy
from tfdist.strategies import MultiWorkerMirroredStrategy


class Fault(keras.callbacks.Callback):
    """Sends this process a signal after the sixth step."""

    def __init__(self, number):
        super().__init__()
        self.number, self.steps = number, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.number and self.steps == 6:
            os.kill(os.getpid(), self.number)


def main(folder, number):
    strategy = MultiWorkerMirroredStrategy(mode=local_models.MODE, compression=Policy("int8", dense_below=0))
    attempted = folder / "attempted"
    is_first = strategy.rank == 1 and not attempted.exists()
    if is_first:
        attempted.touch()
    model = local_models.compiled(strategy, lambda: keras.optimizers.Adam(0.02))
    recovery = FailureRecovery(folder / "checkpoints", every_steps=1, background=False)
    local_models.fit(model, callbacks=[recovery, Fault(number if is_first else 0)])
    np.savez(folder / f"end-{strategy.rank}.npz", **local_models.weights(model))


if __name__ == "__main__":
    main(Path(sys.argv[1]), signal.Signals(int(sys.argv[2])) if sys.argv[2] != "0" else 0)
