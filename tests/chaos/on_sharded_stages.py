"""A training in two columns of two stages that two devices share each, on the workers of `tfdist run --chief`.

on_sharded_stages.py FOLDER EPOCHS SECONDS     writes FOLDER/state.npz; each step takes SECONDS longer

Without a launcher, on eight devices of this process.
"""

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from on_stages import Pause

from tfdist.callbacks import FailureRecovery
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.strategies import ModelParallelStrategy, Pipeline
from tfdist.tensor_parallel.split_variable import SplitVariable

SAMPLES, BATCH, SAVED_EVERY, DEVICES = 44, 8, 3, 8
SPLIT_WEIGHTS = 7
LAYOUTS = {
    ".*(up|more)/kernel": (None, "model"),
    ".*(up|more)/bias": ("model",),
    ".*(down|less)/kernel": ("model", None),
    ".*norm/gamma": ("model",),
}


def parallel(devices: list[str] | None = None, columns: int = 2) -> ModelParallelStrategy:
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices=["any", "names"])
    layout = keras.distribution.LayoutMap(mesh)
    for path, axes in LAYOUTS.items():
        layout[path] = axes
    pipeline = Pipeline(stages=2, micro_batches=2, cuts=["more"])
    return ModelParallelStrategy(devices, pipeline=pipeline, data_parallel=columns, layout_map=layout)


def trained(strategy: Any, folder: Path, epochs: int, seconds: float) -> dict[str, np.ndarray]:
    """Returns the state of model and optimizer after a training with dropout, accumulation and moving averages."""
    keras.utils.set_random_seed(3)
    dense, dropout = keras.layers.Dense, keras.layers.Dropout
    with strategy.scope():
        first = [dense(16, "gelu", name="up"), dense(12, name="down"), keras.layers.BatchNormalization(name="norm")]
        second = [dense(16, "tanh", name="more"), dropout(0.2, seed=2), dense(8, name="less"), dense(12)]
        model = keras.Sequential([keras.Input((12,)), *first, dropout(0.2, seed=1), *second])
        optimizer = keras.optimizers.Adam(1e-2, use_ema=True, global_clipnorm=1.0, gradient_accumulation_steps=2)
        model.compile(optimizer, "mse", metrics=["mae"])
    x, y = np.random.default_rng(0).normal(size=(2, SAMPLES, 12)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SAMPLES, seed=2).batch(BATCH)
    recovery = FailureRecovery(folder / "checkpoints", every_steps=SAVED_EVERY)
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=[recovery, Pause(folder / "steps", seconds)]).history
    state = {f"{index}": variable.numpy() for index, variable in enumerate([*model.variables, *optimizer.variables])}
    split = [one for one in model.weights if isinstance(held_variable(one), SplitVariable)]
    state["number of split weights"] = np.array(len(split) or SPLIT_WEIGHTS)  # none in one process
    return state | {f"history of {name}": np.array(values) for name, values in history.items()}


if __name__ == "__main__":
    here = Path(sys.argv[1])
    if "TF_CONFIG" not in os.environ:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
    np.savez(here / "state.npz", **trained(parallel(), here, int(sys.argv[2]), float(sys.argv[3])))
