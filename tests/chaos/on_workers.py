"""A worker of `test_workers.py`: trains, and does to itself what the plan says for this attempt.

    python on_workers.py FOLDER PLAN

PLAN is a JSON list, by attempts, of `{"rank", "at", "count", "do"}`: `do` is the name of a signal or "raise"; `at` is
a hook of a callback, "fsync" (in the midst of a save), or "restore".
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import training

from tfdist.recovery.training_state import TrainingState
from tfdist.strategies import MultiWorkerMirroredStrategy


def strike(fault):
    print(f"fault: {fault}", flush=True)
    if fault["do"] == "raise":
        raise RuntimeError("on purpose")
    os.kill(os.getpid(), getattr(signal, fault["do"]))


class Fault(keras.callbacks.Callback):
    """Strikes when a hook is called for the n-th time."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.left = fault, fault["count"]

    def _called(self, hook):
        if hook == self.fault["at"]:
            self.left -= 1
            if self.left == 0:
                strike(self.fault)

    def on_train_batch_end(self, batch, logs=None):
        self._called("on_train_batch_end")

    def on_test_batch_end(self, batch, logs=None):
        self._called("on_test_batch_end")

    def on_epoch_end(self, epoch, logs=None):
        self._called("on_epoch_end")


def patch(owner, name, fault):
    """Strikes when `owner.name` is called for the n-th time."""
    original, left = getattr(owner, name), [fault["count"]]

    def patched(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            strike(fault)
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def main(folder, plan):
    strategy = MultiWorkerMirroredStrategy(compression="powersgd:2")
    attempt, callbacks = int(os.environ.get("TFDIST_ATTEMPT", "0")), []
    fault = plan[attempt] if attempt < len(plan) else None
    if fault is not None and fault["rank"] == strategy.rank:
        if fault["at"] == "fsync":
            patch(os, "fsync", fault)
        elif fault["at"] == "restore":
            patch(TrainingState, "restore", fault)
        else:
            callbacks.append(Fault(fault))
    result = training.train(
        folder,
        strategy=lambda: strategy,
        accumulation=2,
        log=f"log-{strategy.rank}.csv",
        callbacks=callbacks,
        every_steps=3,
    )
    np.savez(folder / f"result-{strategy.rank}.npz", **result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
