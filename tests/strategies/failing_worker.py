"""The program of two workers: shapes differ, and later a step fails on rank 1, which catches it and leaves.

Each rank writes what its later uses of a strategy raise.
"""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from aborted_program import error_of

from tfdist.strategies import MultiWorkerMirroredStrategy


class CheckedInput(keras.layers.Layer):
    """Fails where its input is not finite."""

    def call(self, inputs):
        return tf.debugging.check_numerics(inputs, "bad input")


def gather_other_shapes(own_shapes):
    """Returns the errors of a strategy whose workers gather tensors of different shapes, and of its next use."""
    strategy = MultiWorkerMirroredStrategy()
    uses = {
        "gather": lambda: strategy.gather(tf.ones(own_shapes[strategy.rank]), axis=0),
        "run": lambda: strategy.run(lambda: 1),
    }
    return {name: error_of(use) for name, use in uses.items()}


def main(folder: Path) -> None:
    mismatches = [gather_other_shapes(shapes) for shapes in (([1, 2], [1, 3]), ([3, 1, 2], [3, 2, 1]))]
    strategy = MultiWorkerMirroredStrategy()  # connects the workers again
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), CheckedInput(), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    inputs, targets = np.ones([32, 4], "float32"), np.ones([32, 1], "float32")
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8)
    model.fit(data, verbose=0)
    inputs[12:16] = np.nan  # the second batch of rank 1
    bad = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8)
    uses = {
        "first": lambda: model.fit(bad, verbose=0, shuffle=False),
        "fit": lambda: model.fit(data, verbose=0),
        "evaluate": lambda: model.evaluate(data, verbose=0),
        "predict": lambda: model.predict(data, verbose=0),
        "reduce": lambda: strategy.reduce("SUM", tf.constant(1.0), axis=None),
        "gather": lambda: strategy.gather(tf.constant([1.0]), axis=0),
        "new strategy": MultiWorkerMirroredStrategy,
    }
    errors = {"mismatches": mismatches, **{name: error_of(use) for name, use in uses.items()}}
    Path(folder, f"errors-{strategy.rank}.json").write_text(json.dumps(errors))
    os._exit(0)  # nothing is left to shut down together


if __name__ == "__main__":
    main(Path(sys.argv[1]))
