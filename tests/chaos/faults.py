"""What a worker does to itself, at moments that a plan has chosen."""

import errno
import os
import signal

import keras
from step_journal import StepJournal

from tfdist.recovery.training_state import TrainingState


def arm(fault):
    """Makes a fault strike when its time has come; returns the callbacks that are needed for it.

    Args:
      fault: `do` is the name of a signal, of an error of the system, or "raise"; `at` is a hook of a callback,
        "train_step" (in its forward pass, on one of the replicas), "fsync" (in the midst of a save), or "restore";
        `count` says at which call of it.
    """
    if fault["at"] == "fsync":
        _patch(os, "fsync", fault)
    elif fault["at"] == "restore":
        _patch(TrainingState, "restore", fault)
    elif fault["at"] == "train_step":
        _patch(StepJournal, "tell", fault)
    else:
        return [_Fault(fault)]
    return []


def _strike(fault):
    print(f"fault: {fault}", flush=True)
    if fault["do"] == "raise":
        raise RuntimeError("on purpose")
    if number := getattr(errno, fault["do"], None):
        raise OSError(number, os.strerror(number))
    os.kill(os.getpid(), getattr(signal, fault["do"]))


class _Fault(keras.callbacks.Callback):
    """Strikes when a hook is called for the n-th time."""

    def __init__(self, fault):
        super().__init__()
        self.fault, self.left = fault, fault["count"]

    def _called(self, hook):
        if hook == self.fault["at"]:
            self.left -= 1
            if self.left == 0:
                _strike(self.fault)

    def on_train_batch_end(self, batch, logs=None):
        self._called("on_train_batch_end")

    def on_test_batch_end(self, batch, logs=None):
        self._called("on_test_batch_end")

    def on_epoch_end(self, epoch, logs=None):
        self._called("on_epoch_end")


def _patch(owner, name, fault):
    """Strikes when `owner.name` is called for the n-th time."""
    original, left = getattr(owner, name), [fault["count"]]

    def patched(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            _strike(fault)
        return original(*args, **kwargs)

    setattr(owner, name, patched)
