"""A worker whose script sends no heartbeats of its own; rank 1 is killed or stopped after some steps."""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

from tfdist.strategies import MultiWorkerMirroredStrategy


class Lost(keras.callbacks.Callback):
    def __init__(self, folder, how, rank):
        super().__init__()
        self.folder, self.how, self.rank = folder, how, rank

    def on_train_batch_end(self, batch, logs=None):
        if self.rank == 1 and batch == 5:
            Path(self.folder, "lost_at").write_text(repr(time.time()))
            os.kill(os.getpid(), getattr(signal, self.how))


def main(folder, how):
    strategy = MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    inputs, targets = np.ones([800, 4], "float32"), np.ones([800, 1], "float32")
    model.fit(inputs, targets, batch_size=4, verbose=0, callbacks=[Lost(folder, how, strategy.rank)])


if __name__ == "__main__":
    main(*sys.argv[1:])
