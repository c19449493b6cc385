"""A round with a backup worker, whose late part ends during the next round."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.scheduled_training import training_of
from tfdist.strategies import Synchronous

RATE = 0.1
FIRST_BATCH, SECOND_BATCH = 8, 7  # parts of 3, 3 and 2 rows; while one worker is late, of 4 and 3
_random = np.random.default_rng(5)
INPUTS = _random.normal(size=(FIRST_BATCH + SECOND_BATCH, 4)).astype("float32")
TARGETS = _random.normal(size=(FIRST_BATCH + SECOND_BATCH, 1)).astype("float32")
GATES = {9.0: "first", 8.0: "second"}
INPUTS[0, 0], INPUTS[FIRST_BATCH + 4, 0] = GATES


class Gate(keras.layers.Layer):
    """Delays a part whose first number is that of a gate until the gate's file exists."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def call(self, inputs: Any) -> Any:
        passed = []
        for number, name in GATES.items():

            def is_closed(turn: Any, number: float = number, name: str = name) -> Any:
                # The name is not constant; otherwise TensorFlow would look for the file only once.
                path = tf.where(turn < 0, "", str(self.folder / name))
                return (inputs[0, 0] == number) & (tf.size(tf.io.matching_files(path)) == 0)

            passed += tf.while_loop(is_closed, lambda turn: (turn + 1,), (tf.constant(0),))
        with tf.control_dependencies(passed):
            return tf.identity(inputs)


class OpensGates(keras.callbacks.Callback):
    """Releases the late part when the next round has one of two parts, and ends that round after the late part.

    If the late part's buffer had been reused, the late part would now overwrite it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.events = folder, []

    def on_train_begin(self, logs: Any = None) -> None:
        training = training_of(self.model)
        collect = training._collect

        def collect_and_open(tag: Any, packed: Any) -> None:
            collect(tag, packed)
            is_late = tag.round < training._round
            self.events.append("late" if is_late else "in time")
            if len(self.events) >= 3:
                (self.folder / ("second" if is_late else "first")).touch()

        training._collect = collect_and_open


def left_out(strategy: Any, folder: Path) -> dict[str, Any]:
    """Runs two rounds on three workers; the first leaves out its first part."""
    strategy.mode = Synchronous(backup_workers=1)
    with strategy.scope():
        kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((4,)), Gate(folder), kernel])
        model.compile(keras.optimizers.SGD(RATE), loss="mse")
    before, opens = strategy.worker_stats, OpensGates(folder)
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(FIRST_BATCH)
    history = model.fit(data, shuffle=False, verbose=0, callbacks=[opens])
    counts = [count.since(earlier) for count, earlier in zip(strategy.worker_stats, before, strict=True)]
    training = training_of(model)
    return {
        "kernel": kernel.kernel.numpy()[:, 0].tolist(),
        "loss": history.history["loss"][0],
        "events": opens.events,
        "updates": int(model.optimizer.iterations.numpy()),
        "counts": [[count.steps, count.samples, count.left_out] for count in counts],
        "free": training._free == list(range(6)) and not training._late,
    }


def expected() -> dict[str, Any]:
    """Computes the same in NumPy."""
    kernel, losses, rows = np.zeros(4), [], [slice(3, FIRST_BATCH), slice(FIRST_BATCH, None)]
    for taken in rows:
        inputs, targets = INPUTS[taken].astype("float64"), TARGETS[taken, 0].astype("float64")
        errors = inputs @ kernel - targets
        losses.extend(errors**2)
        kernel = kernel - RATE * 2 * inputs.T @ errors / len(errors)
    return {"kernel": kernel, "loss": np.mean(losses)}
