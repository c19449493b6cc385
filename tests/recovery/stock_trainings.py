"""Trainings under TensorFlow's own strategies, small, as XLA takes its time; as a program, one that kills itself.

    python stock_trainings.py FOLDER CASE [CASE ...]

trains the cases one after another, at its first start (by `tfdist run`) not to the end: an exception leaves each in its
first epoch but for the last one, in which the process kills itself. What comes of CASE is written to FOLDER/CASE.npz.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from stock_strategy import FakeTPUStrategy, stock_mirrored

from tfdist.callbacks import FailureRecovery, GradientAccumulation

CPUS = ["CPU:0", "CPU:1"]
EPOCHS, STEPS, BATCH = 2, 6, 8
STRATEGIES = {
    "none": tf.distribute.get_strategy,
    "one device": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
    "mirrored": lambda: stock_mirrored(CPUS),
    "mirrored, one device": lambda: stock_mirrored(CPUS[:1]),
    "one worker": tf.distribute.MultiWorkerMirroredStrategy,
    "central storage": lambda: tf.distribute.experimental.CentralStorageStrategy(CPUS),
    "TPU, faked": FakeTPUStrategy,
}
# The strategy, the micro-steps of GradientAccumulation, and arguments of `compile`.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "mirrored, accumulating": ("mirrored", {0: 2, 1: 4}, {"steps_per_execution": 2}),
    "mirrored, one device, compiled": ("mirrored, one device", None, {"jit_compile": True}),
    "one device": ("one device", None, {}),
    "one device, accumulating, compiled": ("one device", 4, {"jit_compile": True}),
    "none, compiled": ("none", None, {"jit_compile": True}),
    "one worker, accumulating": ("one worker", 4, {}),
    "central storage": ("central storage", None, {}),
    "TPU, faked, accumulating, compiled": ("TPU, faked", 4, {"jit_compile": True}),
}


def train(folder: Path, case: str, *callbacks: keras.callbacks.Callback, **intervals: int) -> dict[str, np.ndarray]:
    """Trains to the end, or until a callback raises; returns what came of it."""
    strategy, accumulation, arguments = CASES[case]
    keras.utils.set_random_seed(3)
    with STRATEGIES[strategy]().scope():
        # Under CentralStorageStrategy Keras cannot train layers with a state of their own.
        state = [] if strategy == "central storage" else [keras.layers.Dropout(0.4)]
        state += [] if strategy in ("central storage", "TPU, faked") else [keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), *state, keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **arguments)
    inputs = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype("int32")
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(STEPS * BATCH, seed=7).batch(BATCH)
    recovery = FailureRecovery(folder / case, **intervals)
    accumulating = [GradientAccumulation(accumulation, flush_at_end=True)] if accumulation else []
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[*accumulating, recovery, *callbacks])
    variables = [variable.value for variable in (*model.variables, *model.optimizer.variables)]
    return {
        **{
            f"variable {index}@{replica}": value.numpy()
            for index, variable in enumerate(variables)
            for replica, value in enumerate(getattr(variable, "values", [variable]))
        },
        **{f"history {name}": np.array(values) for name, values in history.history.items()},
    }


class Left(Exception):
    """What ends a training that is left."""


class Stop(keras.callbacks.Callback):
    """Calls `stop` after so many batches."""

    is_stateless = True

    def __init__(self, batches: int, stop: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._stop = batches, stop

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._stop()


def leave() -> None:
    raise Left


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, *cases: str) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    is_first_start = os.environ["TFDIST_ATTEMPT"] == "0"
    for case in cases:
        stops = [Stop(3, kill if case == cases[-1] else leave)] if is_first_start else []
        with contextlib.suppress(Left):
            np.savez(folder / f"{case}.npz", **train(folder, case, *stops, every_steps=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
