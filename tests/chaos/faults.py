"""Injects faults into this worker, at moments that a plan chooses."""

import errno
import os
import shutil
import signal
import time

import keras
from step_journal import StepJournal

from tfdist.checkpoint import CheckpointStore
from tfdist.cluster import MEMORY_VARIABLE
from tfdist.recovery.storage_tiers import memory_of
from tfdist.recovery.training_state import TrainingState

_LIMIT_SECONDS = 240


def arm(fault, checkpoints, *, in_memory=False):
    """Arms a fault; returns the callbacks that it needs.

    Args:
        fault: `do` is the name of a signal, of an error of the system, "raise", "lose the disk": a SIGKILL after all
            checkpoints of this worker are removed, or "lose all memory": after all that the workers kept there is; `at`
            is a hook of a callback, "train_step" (in its forward pass, on one of the replicas), "fsync" (in the middle
            of a save), or "restore"; `count` is the number of the call at which it strikes. Checkpoints are written in
            the background: with `after_save`, a number of steps, it waits until a checkpoint has them, from which the
            next attempt resumes.
        checkpoints: The directory of the checkpoints.
        in_memory: Whether steps that are saved in memory count, which is lost with the disk.
    """
    memory = memory_of(os.environ[MEMORY_VARIABLE], str(checkpoints)) if in_memory else None
    fault = {**fault, "checkpoints": [str(path) for path in (checkpoints, memory) if path]}
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
    _wait_for_save(fault)
    print(f"fault: {fault}", flush=True)
    if fault["do"] == "raise":
        raise RuntimeError("on purpose")
    if number := getattr(errno, fault["do"], None):
        raise OSError(number, os.strerror(number))
    if fault["do"] == "lose the disk":
        for directory in fault["checkpoints"]:
            shutil.rmtree(directory)
    if fault["do"] == "lose all memory":
        shutil.rmtree(os.environ[MEMORY_VARIABLE])
    os.kill(os.getpid(), getattr(signal, fault["do"], signal.SIGKILL))


def _wait_for_save(fault):
    end = time.monotonic() + _LIMIT_SECONDS
    while _saved_steps(fault["checkpoints"]) < fault.get("after_save", 0):
        if time.monotonic() > end:
            raise TimeoutError(f"no checkpoint of {fault['after_save']} steps")
        time.sleep(0.01)


def _saved_steps(checkpoints):
    """The steps in the newest complete checkpoint."""
    found = [entry for directory in checkpoints for entry in CheckpointStore(directory).list_checkpoints()]
    return max((entry.metadata["step"] for entry in found if entry.status == "complete"), default=0)


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
