"""What a worker of `test_interface_counters.py` does: trains, and reads what its interface has sent meanwhile."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies import MultiWorkerMirroredStrategy

WIDTH, STEPS = 1000, 24  # a gradient of 4 MB


def meet(strategy):
    """Returns when all workers have received what was sent to them before."""
    strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)


def main(interface: str, output: Path) -> None:
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    seen = {}
    for compression in (None, "int8"):
        strategy = MultiWorkerMirroredStrategy(compression=compression)
        with strategy.scope():
            model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)])
            model.compile(keras.optimizers.SGD(1e-3), loss="mse")
        batch = np.random.default_rng(0).normal(size=(4, WIDTH)).astype("float32")
        data = tf.data.Dataset.from_tensors((batch, batch)).repeat(STEPS)
        model.fit(data.take(2), verbose=0)  # traced, and the connections made
        meet(strategy)
        sent, counted = int(counter.read_text()), strategy.communication
        model.fit(data, verbose=0)
        meet(strategy)
        sent, counted = int(counter.read_text()) - sent, strategy.communication - counted
        seen[compression or "dense"] = {"sent": sent, "wire": counted.wire_bytes, "updates": counted.updates}
    output.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
