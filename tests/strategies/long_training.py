"""A training of many steps of a tiny model. The process that calls `fit` writes what it holds, from step to step.

long_training.py FOLDER CASE STEPS
"""

import ctypes
import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery, TrainingMonitor
from tfdist.strategies import (
    DiLoCo,
    LocalSGD,
    MirroredStrategy,
    ModelParallelStrategy,
    MultiWorkerMirroredStrategy,
    ParameterServerStrategy,
    Pipeline,
    Synchronous,
)

ROWS = 8

WORKERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "two devices": (lambda: MirroredStrategy(["CPU:0", "CPU:1"]), ("--workers", "1")),
    "two devices, PowerSGD": (
        lambda: MirroredStrategy(["CPU:0", "CPU:1"], compression="powersgd:1"),
        ("--workers", "1"),
    ),
    "two workers": (MultiWorkerMirroredStrategy, ("--workers", "2")),
    "two workers, int8": (lambda: MultiWorkerMirroredStrategy(compression="int8"), ("--workers", "2")),
    "two workers, PowerSGD": (lambda: MultiWorkerMirroredStrategy(compression="powersgd:1"), ("--workers", "2")),
    "two workers, slots split": (lambda: MultiWorkerMirroredStrategy(shard_optimizer_state=True), ("--workers", "2")),
    "two workers, LocalSGD": (lambda: MultiWorkerMirroredStrategy(mode=LocalSGD(8)), ("--workers", "2")),
    "two workers, DiLoCo": (lambda: MultiWorkerMirroredStrategy(mode=DiLoCo(8)), ("--workers", "2")),
    "parameter servers": (ParameterServerStrategy, ("--workers", "1", "--parameter-servers", "1")),
    "parameter servers, rounds": (
        lambda: ParameterServerStrategy(mode=Synchronous()),
        ("--workers", "1", "--parameter-servers", "1"),
    ),
    "pipeline": (
        lambda: ModelParallelStrategy(["CPU:0", "CPU:1"], pipeline=Pipeline(stages=2, micro_batches=2)),
        ("--workers", "1"),
    ),
}


def allocated_bytes() -> int:
    """Returns the bytes that the C library has given out and not got back, without what it keeps for later."""
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(library.fopen(file.name.encode(), b"w"))
        library.malloc_info(0, stream)
        library.fclose(stream)
        text = Path(file.name).read_text()
    text = text[text.rindex("</heap>") :]

    def size(pattern: str) -> int:
        return int(re.search(pattern + r'[^>]* size="(\d+)"', text)[1])  # type: ignore[index]

    return size('system type="current"') + size('type="mmap"') - size('type="fast"') - size('type="rest"')


class Held(keras.callbacks.Callback):
    """Notes what this process holds."""

    def __init__(self, every_steps: int) -> None:
        super().__init__()
        self.every_steps, self.steps = every_steps, 0
        self.rows: list[dict[str, int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps % self.every_steps == 0:
            gc.collect()
            threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
            row = {"step": self.steps, "bytes": allocated_bytes(), "threads": threads, "descriptors": files}
            self.rows.append(row)


def main(folder: Path, case: str, steps: int) -> None:
    """Trains the case."""
    if "two devices" in case or case == "pipeline":
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    strategy = WORKERS[case][0]()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([8]), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    random = np.random.default_rng(0)
    x = random.random([8 * ROWS, 8], "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    dataset = dataset.batch(ROWS, drop_remainder=True).cache().repeat()
    held = Held(every_steps=steps // 20)
    callbacks = [
        held,
        FailureRecovery(folder / f"checkpoints {case}", every_steps=500),
        TrainingMonitor(folder / f"logs {case}", every_steps=100),
    ]
    model.fit(dataset, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=callbacks)
    if getattr(strategy, "rank", 0) == 0:
        (folder / f"{case}.json").write_text(json.dumps(held.rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
