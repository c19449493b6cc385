"""What the comparison of batches costs: CPU time of drawing batches with and without it, beside that of training steps.

    tfdist run --workers 2 benchmarks/batch_comparison.py

The same batches are drawn in turns, with nothing else to do, so that a difference of some microseconds is seen: as they
are; through the function that looks at their numbers, which then does nothing; and compared. The chief prints
medians, in milliseconds of CPU time of its process.
"""

import json
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies import MultiWorkerMirroredStrategy
from tfdist.training.batch_comparison import common_inputs, shown_batches

ROWS, BATCH, WIDTH, EPOCHS, ROUNDS = 12_800, 256, 1024, 4, 15
STEPS = ROWS // BATCH


def main() -> None:
    """Measures, and prints the medians."""
    strategy = MultiWorkerMirroredStrategy()
    x = np.random.normal(size=(ROWS, WIDTH)).astype("float32")
    plain = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(ROWS, seed=1).batch(BATCH)
    comparison = strategy._batch_comparison
    shown, showing = _timed(lambda: comparison.shown(plain))
    looked_at = shown_batches(plain, [number for _, number in common_inputs(plain)], lambda *_: None)

    def draw(dataset: tf.data.Dataset) -> None:
        for _ in range(EPOCHS):
            for _ in dataset:
                pass

    def draw_and_compare() -> None:
        draw(shown)
        comparison.end(only_new=False)  # until the chief has compared

    draw_and_compare()
    draw(looked_at)
    times: dict[str, list[float]] = {"compared": [], "looked at": [], "plain": []}
    for _ in range(ROUNDS):
        times["compared"].append(_timed(draw_and_compare)[1])
        times["looked at"].append(_timed(lambda: draw(looked_at))[1])
        times["plain"].append(_timed(lambda: draw(plain))[1])
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(plain, epochs=1, verbose=0)
    fit = _timed(lambda: model.fit(plain, epochs=EPOCHS, verbose=0))[1] / EPOCHS / STEPS
    if strategy.rank == 0:
        a_step = {kind: statistics.median(each) / EPOCHS / STEPS for kind, each in times.items()}
        added, comparing = a_step["compared"] - a_step["plain"], a_step["compared"] - a_step["looked at"]
        figures = {
            "steps of an epoch": STEPS,
            "a step of fit": round(fit, 3),
            "a batch, compared": round(a_step["compared"], 4),
            "a batch, looked at": round(a_step["looked at"], 4),
            "a batch": round(a_step["plain"], 4),
            "added, percent of a step": round(100 * added / fit, 3),
            "of it by fingerprints and their exchange": round(100 * comparing / fit, 3),
            "once for each dataset": round(showing, 1),
        }
        print(json.dumps(figures, indent=1))


def _timed(function):
    began = time.process_time()
    result = function()
    return result, 1e3 * (time.process_time() - began)


if __name__ == "__main__":
    main()
