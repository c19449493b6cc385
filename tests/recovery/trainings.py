"""Trainings that are saved half-way and restored into new objects, in this process or, as a program, in a new one.

    python trainings.py FOLDER CASE SETUP [CASE SETUP ...]

resumes from what `write` left in FOLDER/CASE, and writes the result to FOLDER/CASE/after.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from stock_strategy import stock_mirrored

from tfdist.compression import MomentumCorrection, Policy, TopK
from tfdist.recovery.random_generators import (
    check_python_and_numpy,
    python_and_numpy_state,
    restore_python_and_numpy,
)
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

HALF, END = 5, 8
FEATURES, CLASSES, ROWS = 6, 3, 12
SPEC = (tf.TensorSpec([None, FEATURES]), tf.TensorSpec([None], tf.int64))
CPUS = ["CPU:0", "CPU:1"]


class Noise(keras.layers.Layer):
    """Draws from Keras' global seed generator, which works in one thread only, and so on one replica."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs)) if training else inputs


class Unusual(keras.Model):
    """Layers in a list, a frozen one in a model within the model, variables without names, a second optimizer."""

    def __init__(self) -> None:
        super().__init__()
        frozen = keras.layers.Dense(8, name="frozen")
        inner = keras.Sequential([keras.Input((FEATURES,)), frozen, keras.layers.BatchNormalization()])
        frozen.trainable = False
        self.blocks = [inner, keras.layers.Dropout(0.5)]
        self.head = keras.layers.Dense(CLASSES)
        self.generator = keras.random.SeedGenerator(3)
        self.calls = self.add_weight(shape=(), trainable=False, aggregation="mean")
        self.gain = self.add_weight(shape=(), initializer="ones")
        self.second = keras.optimizers.SGD(0.01, momentum=0.9)
        self.second.build([self.gain])

    def call(self, inputs: Any, training: bool = False) -> Any:
        for block in self.blocks:
            inputs = block(inputs, training=training)
        if training:
            inputs += keras.random.normal(keras.ops.shape(inputs), stddev=0.1, seed=self.generator)
            self.calls.assign(self.calls + 1)
        return self.head(inputs) * self.gain

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.second.apply([tf.convert_to_tensor(self.gain)], [self.gain])
        return logs


def unusual() -> keras.Model:
    keras.utils.set_random_seed(7)
    model = Unusual()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss=loss, weighted_metrics=["accuracy"])
    return model


def compiled(optimizer: Any, *extra: Any, policy: str = "float32") -> keras.Model:
    keras.utils.set_random_seed(7)
    dense = keras.layers.Dense
    layers = [dense(16, "relu", dtype=policy), keras.layers.BatchNormalization(dtype=policy), keras.layers.Dropout(0.4)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, *extra, dense(CLASSES)])
    if policy != "float32":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**14, dynamic_growth_steps=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    return model


Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
CASES: dict[str, Callable[[], keras.Model]] = {
    "average": lambda: compiled(Adam(0.01, use_ema=True, amsgrad=True)),
    "schedule": lambda: compiled(SGD(keras.optimizers.schedules.CosineDecay(0.1, END), momentum=0.9)),
    "accumulation": lambda: compiled(Adam(0.01, gradient_accumulation_steps=2)),
    "float16": lambda: compiled(Adam(0.01), policy="mixed_float16"),
    "float16_accumulation": lambda: compiled(Adam(0.01, gradient_accumulation_steps=2), policy="mixed_float16"),
    "unusual": unusual,
    "global_seeds": lambda: compiled(SGD(0.1), Noise()),
}
SETUPS: dict[str, Callable[[], Any]] = {
    "none": tf.distribute.get_strategy,
    "stock": lambda: stock_mirrored(CPUS),
    "tfdist": lambda: MirroredStrategy(CPUS),
    "workers": MultiWorkerMirroredStrategy,  # one of them, with all devices
    "powersgd": lambda: MirroredStrategy(CPUS, compression=Policy("powersgd:2", dense_below=0, dense_steps=1)),
    "topk": lambda: MirroredStrategy(CPUS, compression=Policy(MomentumCorrection(TopK(0.3)), dense_below=0)),
}


def made(case: str, setup: str) -> keras.Model:
    with SETUPS[setup]().scope():
        return CASES[case]()


def steps(model: keras.Model, first: int, end: int) -> dict[str, float]:
    """Training steps, each on different data and on draws from the generators of Python and NumPy."""
    logs = {}
    for step in range(first, end):
        inputs = np.random.default_rng(step).normal(size=(ROWS, FEATURES)) + 0.1 * np.random.normal() + random.random()
        logs = model.train_on_batch(inputs.astype("float32"), np.arange(ROWS) % CLASSES, return_dict=True)
    return logs


State = dict[str, Any]


def saved(model: keras.Model) -> State:
    parts = zip(
        ("shared", "per_replica", "description"), VariableSnapshots(TrainedModel(model)).snapshot(), strict=True
    )
    return {**dict(parts), "generators": python_and_numpy_state()}


def restore(model: keras.Model, state: State) -> None:
    variables = VariableSnapshots(TrainedModel(model))
    variables.build(SPEC)
    variables.check(state["shared"], state["per_replica"], state["description"])
    check_python_and_numpy(state["generators"])
    variables.restore_shared(state["shared"], state["description"])
    variables.restore_per_replica(state["per_replica"], state["description"])
    variables.restore_metrics(state["per_replica"], state["description"])
    restore_python_and_numpy(state["generators"])


def write(state: State, folder: Path) -> None:
    folder.mkdir()
    for part in ("shared", "per_replica"):
        np.savez(folder / f"{part}.npz", **state[part])
    (folder / "notes.json").write_text(json.dumps([state["description"], state["generators"]], allow_nan=False))


def read(folder: Path) -> State:
    description, of_generators = json.loads((folder / "notes.json").read_text())
    parts = {part: dict(np.load(folder / f"{part}.npz")) for part in ("shared", "per_replica")}
    return {**parts, "description": description, "generators": of_generators}


def make_devices() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)


def shift_names() -> None:
    """Uses up Keras' automatic names and some random numbers, as other models made before would."""
    for _ in range(3):
        keras.layers.Dense(1).build((None, 1))
        keras.layers.Dropout(0.5)
        keras.Variable(1.0)


if __name__ == "__main__":
    make_devices()
    shift_names()
    for case, setup in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        folder = Path(sys.argv[1]) / case
        restarted = made(case, setup)
        restore(restarted, read(folder))
        steps(restarted, HALF, END)
        write(saved(restarted), folder / "after")
