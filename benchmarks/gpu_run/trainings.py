"""What the programs of the kit train: each is a function of a strategy that returns arrays, and facts for JSON."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Outcome = tuple[dict[str, np.ndarray], dict[str, Any]]
SAMPLES, BATCH_SIZE, CLASSES, SIDE = 58, 16, 10, 16  # three batches of 16, and one of 10
_random = np.random.default_rng(0)
IMAGES = _random.normal(size=(SAMPLES, SIDE, SIDE, 3)).astype("float32")
VECTORS = _random.normal(size=(SAMPLES, 64)).astype("float32")
LABELS = _random.integers(0, CLASSES, size=SAMPLES).astype("int32")
SAMPLE_WEIGHTS = (_random.integers(0, 5, size=SAMPLES) / 2).astype("float32")
_OVERFLOWING_BATCH, _OVERFLOWING_ROW = 1, 13  # in the second half of a batch, that is on the last replica
_ELASTIC_EPOCHS, _PASSES_OF_AN_EPOCH = 3, 10
_FLIPPED_BIT = 6  # of a float32: smaller ones are lost in rounding
_MISSING_STEP_SECONDS, _LONGEST_WAIT_SECONDS = 0.3, 60.0


def convolutions(strategy: Any, *, policy: str = "float32", **compile_arguments: Any) -> Outcome:
    """Convolutions and batch statistics; accumulation, clipping, weights of samples, an uneven last batch."""
    with strategy.scope():
        model = _built(_convolution_layers, policy)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0, gradient_accumulation_steps=2)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
        model.compile(optimizer, _cross_entropy(), weighted_metrics=["accuracy"], **compile_arguments)
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS, SAMPLE_WEIGHTS)).batch(BATCH_SIZE)
    return _fitted(model, data, IMAGES, epochs=4)


def adam(strategy: Any) -> Outcome:
    """Adam with clipping on dense layers, without batch statistics: for servers, sharded state and stages."""
    with strategy.scope():
        model = _built(_dense_layers)
        optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=1.0)
        model.compile(optimizer, _cross_entropy(), weighted_metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((VECTORS, LABELS, SAMPLE_WEIGHTS)).batch(BATCH_SIZE)
    return _fitted(model, data, VECTORS, epochs=2)


def overflow(strategy: Any) -> Outcome:
    """float16 with a batch in which one sample overflows, so that all replicas must skip its update."""
    inputs = VECTORS[: 4 * BATCH_SIZE // 2].copy()
    inputs[_OVERFLOWING_BATCH * BATCH_SIZE // 2 + _OVERFLOWING_ROW // 2] = 3e4
    scales: list[float] = []
    with strategy.scope():
        model = _built(_dense_layers, "mixed_float16")
        inner = keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**13, dynamic_growth_steps=2)
        model.compile(optimizer, _cross_entropy())
    data = tf.data.Dataset.from_tensor_slices((inputs, LABELS[: len(inputs)])).batch(BATCH_SIZE // 2)
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(float(optimizer.dynamic_scale.numpy()))
    )
    model.fit(data, epochs=1, verbose=0, shuffle=False, callbacks=[note])
    facts = {"scales": scales, "updates": int(keras.ops.convert_to_numpy(optimizer.iterations))}
    return _weights(model), facts


def compressed(strategy: Any) -> Outcome:
    """Dense layers of a hundred thousand values, by the compression of the strategy."""
    with strategy.scope():
        model = _built(lambda: [keras.Input((64,)), *_hidden(256, 256), keras.layers.Dense(CLASSES)])
        model.compile(keras.optimizers.SGD(0.05), _cross_entropy())
    data = tf.data.Dataset.from_tensor_slices((VECTORS, LABELS)).batch(BATCH_SIZE)
    arrays, facts = _fitted(model, data, VECTORS, epochs=2)
    by_method = getattr(strategy, "communication_by_method", {})
    return arrays, {**facts, "sent": {label: stats.wire_bytes for label, stats in by_method.items()}}


def recovered(strategy: Any, folder: Path, kill_at_step: int) -> Outcome:
    """Dropout, batch statistics and momentum under `FailureRecovery`; worker 1 may kill itself, once."""
    from tfdist.callbacks import FailureRecovery

    class KillItself(keras.callbacks.Callback):
        """Kills this process without warning."""

        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Counts the steps."""
            self.steps += 1
            if self.steps == kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)

    with strategy.scope():
        model = _built(_convolution_layers, dropout=0.3)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), _cross_entropy(), metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(SAMPLES, seed=5).batch(BATCH_SIZE)
    callbacks: list[Any] = [FailureRecovery(folder / "checkpoints", every_steps=2)]
    is_first = os.environ.get("TFDIST_ATTEMPT", "0") == "0"
    if kill_at_step and is_first and strategy.rank == 1:
        callbacks.append(KillItself())
    model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
    return _weights(model), {"attempt": os.environ.get("TFDIST_ATTEMPT", "0")}


def elastic(
    strategy: Any,
    folder: Path | None = None,
    *,
    kill_at_step: int = 0,
    flip_at_step: int = 0,
    check_gradients: float | None = None,
) -> Outcome:
    """Convolutions and batch statistics, while the last worker is lost once, or has a wrong bit, and joins again.

    Steps are slow while it is missing, so that it joins before the end. With `check_gradients` gradients are compared.
    """
    from tfdist.callbacks import WeightComparison

    rank, workers = getattr(strategy, "rank", 0), getattr(strategy, "num_workers", 1)
    living: list[int] = []

    class Faults(keras.callbacks.Callback):
        """Kills this process or changes a weight, once, and notes how many train."""

        steps, waits_until = 0, time.monotonic() + _LONGEST_WAIT_SECONDS

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Counts the steps."""
            self.steps += 1
            training = len(getattr(strategy, "living_ranks", ()))
            if living[-1:] != [training]:
                living.append(training)
            if not training or folder is None:
                return
            mark = folder / "lost"
            if rank == workers - 1 and training == workers and not mark.exists():
                if kill_at_step and self.steps >= kill_at_step:
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if flip_at_step and self.steps >= flip_at_step:
                    mark.touch()
                    weight = self.model.trainable_variables[0]
                    bits = weight.numpy().view(np.uint32)
                    bits.flat[0] ^= 1 << _FLIPPED_BIT
                    weight.assign(bits.view(np.float32))
            if training < workers and time.monotonic() < self.waits_until:
                time.sleep(_MISSING_STEP_SECONDS)

    with strategy.scope():
        model = _built(_convolution_layers)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), _cross_entropy(), weighted_metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS, SAMPLE_WEIGHTS))
    data = data.repeat(_PASSES_OF_AN_EPOCH).batch(BATCH_SIZE)
    callbacks: list[Any] = [Faults()] if workers > 1 else []
    if flip_at_step or check_gradients:
        callbacks.append(WeightComparison(5, check_gradients=check_gradients))
    arrays, facts = _fitted(model, data, IMAGES, epochs=_ELASTIC_EPOCHS, callbacks=callbacks)
    return arrays, {**facts, "living": living}


TRAININGS: dict[str, Callable[..., Outcome]] = {
    "convolutions": convolutions,
    "adam": adam,
    "mixed_float16": lambda strategy: convolutions(strategy, policy="mixed_float16"),
    "mixed_bfloat16": lambda strategy: convolutions(strategy, policy="mixed_bfloat16"),
    "overflow": overflow,
    "jit_compile": lambda strategy: convolutions(strategy, jit_compile=True),
    "compressed": compressed,
    "elastic": elastic,
}


def _convolution_layers(dropout: float = 0.0) -> list[Any]:
    layers = keras.layers
    return [
        keras.Input((SIDE, SIDE, 3)),
        layers.Conv2D(16, 3, activation="relu"),
        layers.BatchNormalization(synchronized=True),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.Flatten(),
        *([layers.Dropout(dropout)] if dropout else []),
        layers.Dense(64, activation="relu"),
        layers.Dense(CLASSES, dtype="float32"),
    ]


def _dense_layers() -> list[Any]:
    up, down = (
        keras.layers.Dense(width, "relu", name=name) for width, name in ((64, "up"), (48, "down"))
    )  # the names by which layers are split
    return [keras.Input((64,)), up, down, keras.layers.Dense(CLASSES, dtype="float32")]


def _hidden(*widths: int) -> list[Any]:
    return [keras.layers.Dense(width, activation="relu") for width in widths]


def _built(layers: Callable[..., list[Any]], policy: str = "float32", **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        return keras.Sequential(layers(**arguments))
    finally:
        keras.config.set_dtype_policy("float32")


def _cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _fitted(
    model: keras.Model, data: Any, inputs: np.ndarray, *, epochs: int, callbacks: Sequence[Any] = ()
) -> Outcome:
    history = model.fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks)).history
    logs = {f"log {name}": np.asarray(values, "float64") for name, values in history.items()}
    predicted = model.predict(inputs, batch_size=BATCH_SIZE, verbose=0)
    device = model.trainable_variables[0].value.device
    return {**_weights(model), **logs, "predictions": np.asarray(predicted)}, {"device": str(device)}


def _weights(model: keras.Model) -> dict[str, np.ndarray]:
    return {f"weight {index}": np.asarray(value) for index, value in enumerate(model.get_weights())}
