"""The program that is planned and trained: a model of `workloads.py`, by `fit` under `tfdist.strategies.planned()`.

    program.py MODEL WORKERS [STEPS [FILE]]

`WORKERS` gives the size of a global batch. Rank 0 writes `FILE`, a JSON object: `memory_bytes`, the largest resident
memory of its process, and `step_seconds`, the median time of a step.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import keras
import numpy as np
from workloads import WORKLOADS

import tfdist.strategies

_BATCHES = 8
_WARM_UP = 6  # steps that are traced, or that optimize their plan of memory
_LEARNING_RATE = 1e-3


def main() -> None:
    """Trains one epoch of a few steps."""
    name, workers, *more = sys.argv[1:]
    steps, file = int(more[0]) if more else _BATCHES, Path(more[1]) if more[1:] else None
    strategy = tfdist.strategies.planned()
    workload, workers_in_batch = WORKLOADS[name], int(workers)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = workload.build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(_LEARNING_RATE), loss)
    batches = [workload.batch(index) for index in range(_BATCHES * workers_in_batch)]
    inputs, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    ends: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    batch_size, epochs = workload.batch_size * workers_in_batch, -(-steps // _BATCHES)
    model.fit(inputs, labels, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[note])
    if file is not None and strategy.rank == 0:
        status = Path("/proc/self/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        seconds = statistics.median(np.diff(ends[_WARM_UP:]).tolist())
        file.write_text(json.dumps({"memory_bytes": int(line.split()[1]) * 1024, "step_seconds": seconds}))


if __name__ == "__main__":
    main()
