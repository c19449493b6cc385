"""Measures what XLA is worth under `MultiWorkerMirroredStrategy`: steps with `jit_compile=True` against without.

    tfdist run --workers 2 benchmarks/xla.py                  all models
    tfdist run --workers 2 benchmarks/xla.py --models text    this one

Both kinds of training alternate within one run, on the same batches. A step's time is that between the ends of two
steps of one `fit`. Writes `benchmarks/results/xla.json`, and prints a table of medians of the first worker, and of
ratios.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from workloads import WORKLOADS, Workload

from tfdist.strategies import MultiWorkerMirroredStrategy

_FILE = Path(__file__).parent / "results" / "xla.json"
_ROUNDS = 10
_STEPS = 8  # of each kind in a round
_STEPS_OF_DIFFERENCE = 20


class StepTimes(keras.callbacks.Callback):
    """Collects the milliseconds between the ends of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.milliseconds: list[float] = []
        self._ended_at: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._ended_at = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if self._ended_at is not None:
            self.milliseconds.append(1e3 * (now - self._ended_at))
        self._ended_at = now


def measure(workload: Workload, strategy: tf.distribute.Strategy) -> dict[str, float]:
    """Returns the medians of steps in milliseconds, the seconds of first steps, and the difference of weights.

    The difference is the largest one after 20 steps.
    """
    batch_size = workload.batch_size * strategy.num_replicas_in_sync
    batches = [workload.batch(index) for index in range(strategy.num_replicas_in_sync)]
    inputs, labels = (np.concatenate(parts)[:batch_size] for parts in zip(*batches, strict=True))
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat()
    models, times, first = {}, {}, {}
    for jit_compile in (False, True):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = workload.build()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=jit_compile)
        start = time.perf_counter()
        model.fit(data, steps_per_epoch=1, verbose=0)
        first[jit_compile] = time.perf_counter() - start
        model.fit(data, steps_per_epoch=_STEPS_OF_DIFFERENCE - 1, verbose=0)
        models[jit_compile], times[jit_compile] = model, StepTimes()
    weights = [model.get_weights() for model in models.values()]
    for _ in range(_ROUNDS):
        for jit_compile, model in models.items():
            model.fit(data, steps_per_epoch=_STEPS, verbose=0, callbacks=[times[jit_compile]])
    without, with_xla = (statistics.median(times[jit_compile].milliseconds) for jit_compile in (False, True))
    return {
        "without_ms": without,
        "with_ms": with_xla,
        "ratio": without / with_xla,
        "first_step_without_s": first[False],
        "first_step_with_s": first[True],
        "difference": max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)),
    }


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    chosen = parser.parse_args().models
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = MultiWorkerMirroredStrategy()
    results = {name: measure(WORKLOADS[name], strategy) for name in chosen}
    if strategy.rank == 0:
        _FILE.write_text(json.dumps(results, indent=1) + "\n")
        rows = [["model", "ms without", "ms with XLA", "times faster", "first step s", "with XLA s", "difference"]]
        for name, found in results.items():
            rows.append([name, *(f"{value:.3g}" for value in found.values())])
        print("\n".join("  ".join(f"{cell:>13}" for cell in row) for row in rows))


if __name__ == "__main__":
    main()
