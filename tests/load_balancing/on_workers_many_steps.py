"""The program of the workers in `test_many_steps_on_workers.py`: 500 steps, of which a worker sleeps for each row."""

import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.strategies import MultiWorkerMirroredStrategy

STEPS, BATCH = 500, 64
SECONDS_PER_ROW = 0.0005, 0.001


class Sleeping(keras.layers.Layer):
    """The identity, which takes time for each row; its gradient takes none."""

    def __init__(self, seconds_per_row):
        super().__init__()
        self._seconds_per_row = seconds_per_row

    def call(self, inputs):
        def sleep(rows):
            time.sleep(self._seconds_per_row * len(rows))
            return rows

        slept = tf.numpy_function(sleep, [inputs], inputs.dtype, stateful=False)
        return inputs + tf.stop_gradient(tf.ensure_shape(slept, inputs.shape) - inputs)


class Measured(keras.callbacks.Callback):
    """Keeps what all workers have measured and computed after each step, and the present shares."""

    def __init__(self, shares):
        super().__init__()
        self._shares, self.seen = shares, []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([[one.share, one.seconds, one.samples] for one in self._shares.stats()])


def main(folder: Path, threads: int) -> None:
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    rank = cluster.detect().rank
    strategy = MultiWorkerMirroredStrategy(load_balancing=True)
    with strategy.scope():
        layers = Sleeping(SECONDS_PER_ROW[rank]), keras.layers.Dense(2)
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("sgd", "mse")
    inputs = np.ones([4 * BATCH, 4], "float32")
    data = tf.data.Dataset.from_tensor_slices((inputs, inputs[:, :2])).batch(BATCH, drop_remainder=True).repeat()
    measured = Measured(strategy.row_shares)
    model.fit(data, steps_per_epoch=STEPS, verbose=0, callbacks=[measured])
    (folder / f"measured-{rank}.json").write_text(json.dumps(measured.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
