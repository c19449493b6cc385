"""What the comparison of batches costs: batches of a pipeline with and without it, and one comparison.

Run `python benchmarks/batch_comparison.py`. It prints microseconds for each batch that is not compared, and
milliseconds for the trace of a dataset and for the fingerprint of a batch of 1 MB.
"""

import json
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.compared_datasets import common_inputs, shown_batches
from tfdist.training.batch_fingerprints import fingerprint

BATCHES, ROUNDS = 3000, 9


def seconds_for_each_batch(dataset: tf.data.Dataset) -> float:
    """Returns the time to draw a batch."""
    iterator = iter(dataset)
    next(iterator)
    started, count = time.perf_counter(), 0
    for _ in iterator:
        count += 1
    return (time.perf_counter() - started) / count


def seconds(function: Callable[[], object]) -> float:
    """Returns the time of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    """Measures, and prints the medians."""
    batch = (np.ones((256, 1024), "float32"), np.arange(256))
    plain = tf.data.Dataset.from_tensors(batch).repeat(BATCHES)

    def compared() -> tf.data.Dataset:
        numbers = [number for _, number in common_inputs(plain)]
        return shown_batches(plain, numbers, lambda *_: None)

    traces = sorted(seconds(compared) for _ in range(ROUNDS))
    shown = compared()
    pairs = [(seconds_for_each_batch(plain), seconds_for_each_batch(shown)) for _ in range(ROUNDS)]
    more = sorted(after - before for before, after in pairs)
    prints = sorted(seconds(lambda: [fingerprint(part) for part in batch]) for _ in range(ROUNDS))
    middle = ROUNDS // 2
    figures = {
        "microseconds of a batch": round(1e6 * more[middle], 1),
        "milliseconds of a trace": round(1e3 * traces[middle], 1),
        "milliseconds of a fingerprint": round(1e3 * prints[middle], 2),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
