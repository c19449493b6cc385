"""What the comparison of batches costs: the same `fit` with and without it, in turn.

Run `tfdist run --workers 2 benchmarks/batch_comparison.py`. The chief prints medians, of wall time and of CPU time of
its process.
"""

import json
import statistics
import time

import keras
import numpy as np

from tfdist.strategies import MultiWorkerMirroredStrategy

ROWS, BATCH, WIDTH, EPOCHS, ROUNDS = 12_800, 256, 1024, 4, 7


def main() -> None:
    """Measures, and prints the medians."""
    strategy = MultiWorkerMirroredStrategy()
    x = np.random.normal(size=(ROWS, WIDTH)).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(4)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    comparison = strategy._batch_comparison

    def fit(epochs: int, *, compares: bool) -> tuple[float, float]:
        strategy._batch_comparison = comparison if compares else None
        wall, processor = time.perf_counter(), time.process_time()
        model.fit(x, x[:, :1], batch_size=BATCH, epochs=epochs, verbose=0)
        return time.perf_counter() - wall, time.process_time() - processor

    fit(1, compares=True)
    times = {compares: [fit(EPOCHS, compares=compares) for _ in range(1)] for compares in (True, False)}
    for turn in range(ROUNDS):
        for compares in (turn % 2 == 0, turn % 2 != 0):
            times[compares].append(fit(EPOCHS, compares=compares))
    if strategy.rank == 0:
        figures = {
            kind: {
                "with, s": round(statistics.median(each[index] for each in times[True]), 3),
                "without, s": round(statistics.median(each[index] for each in times[False]), 3),
            }
            for index, kind in enumerate(("wall", "CPU"))
        }
        print(json.dumps({"steps": EPOCHS * ROWS // BATCH, **figures}))


if __name__ == "__main__":
    main()
