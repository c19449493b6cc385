"""Interrupts a training in this process, by an exception or a signal."""

import os

import keras
import pytest
from training import train


class Interrupted(Exception):
    """Ends a training."""


class Interrupt(keras.callbacks.Callback):
    """Raises when a hook is called for the n-th time, or sends this process a signal instead."""

    def __init__(self, hook, count, number=None):
        super().__init__()
        self.hook, self.count, self.number = hook, count, number

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "__dict__").get("hook"):
            return self.called
        return super().__getattribute__(name)

    def on_train_batch_end(self, batch, logs=None):
        """Overridden, so that Keras calls it."""

    def on_test_batch_end(self, batch, logs=None):
        """Overridden, so that Keras calls it."""

    def called(self, *_, **__):
        self.count -= 1
        if self.count == 0:
            if self.number is None:
                raise Interrupted
            os.kill(os.getpid(), self.number)


def names(folder):
    """Returns the names in the directory of the checkpoints, without its lock."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != ".lock")


def disturbed(folder, *interruptions, **arguments):
    """Trains once for each interruption (arguments of `Interrupt`), then to the end."""
    for interruption in interruptions:
        with pytest.raises(Interrupted):
            train(folder, callbacks=[Interrupt(*interruption)], **arguments)
    return train(folder, **arguments)
