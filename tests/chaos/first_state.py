"""A callback that records the state with which a worker resumes."""

import keras
import numpy as np

from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots


class FirstState(keras.callbacks.Callback):
    """Writes the per-replica values of this process when its first step begins."""

    is_stateless = True

    def __init__(self, path):
        super().__init__()
        self._path, self._is_written = path, False

    def on_train_batch_begin(self, batch, logs=None):
        if not self._is_written:
            np.savez(self._path, **VariableSnapshots(TrainedModel(self.model)).per_replica())
            self._is_written = True
