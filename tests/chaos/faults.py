"""Injects faults into this worker, at moments that a plan chooses."""

import errno
import os
import signal

import keras
from step_journal import StepJournal

from tfdist.recovery.training_state import TrainingState


def arm(fault):
    """Arms a fault; returns the callbacks that it needs.

    Args:
        fault: `do` is the name of a signal, of an error of the system, or "raise"; `at` is a hook of a callback,
            "train_step" (in its forward pass, on one of the replicas), "fsync" (in the middle of a save), or "restore";
            `count` is the number of the call at which it strikes.
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
    """Raises the fault when a hook is called for the n-th time."""

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
    """Raises the fault when `owner.name` is called for the n-th time."""
    original, left = getattr(owner, name), [fault["count"]]

    def patched(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            _strike(fault)
        return original(*args, **kwargs)

    setattr(owner, name, patched)
