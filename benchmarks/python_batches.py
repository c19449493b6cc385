"""What it costs to copy the batches that Python returns: steps with and without copies, in turns, in one process.

    python benchmarks/python_batches.py

Two replicas on CPUs train on batches of 1 MB from a memory-mapped file.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies import MirroredStrategy

ROWS, FEATURES, HIDDEN, BATCHES = 256, 1024, 704, 16
STEPS_A_TURN, UNTIMED = 12, 4  # batches that were read ahead belong to the turn before


def main() -> None:
    """Measures, writes the result and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=80)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "python_batches.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measured(Path(directory), options.turns)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measured(directory: Path, turns: int) -> dict[str, float]:
    """Returns the medians of the steps with and without copies, and that of the copy of a batch alone."""
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    np.save(directory / "inputs.npy", np.random.default_rng(0).normal(size=(BATCHES * ROWS, FEATURES)).astype("f4"))
    inputs = np.load(directory / "inputs.npy", mmap_mode="r")

    def batches():
        for step in range(turns * STEPS_A_TURN + UNTIMED):
            first = step % BATCHES * ROWS
            yield inputs[first : first + ROWS], inputs[first : first + ROWS, :1]

    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), loss="mae")
    spec = (tf.TensorSpec([ROWS, FEATURES]), tf.TensorSpec([ROWS, 1]))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    step = tf.function(lambda iterator: strategy.run(model.train_step, args=(next(iterator),)))
    iterator = iter(strategy.experimental_distribute_dataset(data))
    step(iterator)
    copies_of = sys.modules["tfdist.tensorflow_internals.python_function_results"]  # no option turns copies off
    copied = copies_of._copied
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns):
        copies = bool(turn % 2)
        copies_of._copied = copied if copies else lambda result: result
        for number in range(STEPS_A_TURN):
            began = time.perf_counter()
            step(iterator)
            if number >= UNTIMED:
                times[copies].append(time.perf_counter() - began)
    copy_times = []
    for number in range(200):
        batch = inputs[number % BATCHES * ROWS :][:ROWS]
        began = time.thread_time()
        copied(batch)
        copy_times.append(time.thread_time() - began)
    without, with_copies = (1e3 * statistics.median(times[copies]) for copies in (False, True))
    return {
        "batch_mb": round(batch.nbytes / 2**20, 2),
        "step_ms_without_copies": round(without, 3),
        "step_ms_with_copies": round(with_copies, 3),
        "added_percent": round(100 * (with_copies / without - 1), 2),
        "copy_alone_cpu_ms": round(1e3 * statistics.median(copy_times), 4),
        "timed_steps": len(times[True]),
    }


if __name__ == "__main__":
    main()
