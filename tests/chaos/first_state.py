"""A callback that tells what a worker goes on with."""

import keras
import numpy as np

from tfdist.recovery.variables import TrainingVariables


class FirstState(keras.callbacks.Callback):
    """Writes what this process has for itself, by replica, when its first step begins."""

    remembers_nothing = True

    def __init__(self, path):
        super().__init__()
        self._path, self._is_written = path, False

    def on_train_batch_begin(self, batch, logs=None):
        if not self._is_written:
            np.savez(self._path, **TrainingVariables(self.model).own())
            self._is_written = True
