"""Cases of compression: encoded pushes, residuals on the workers, rounded pulls, counted bytes."""

from pathlib import Path
from typing import Any

import exchange_model
import keras
import numpy as np
import tensorflow as tf
from cluster_cases import INPUTS, LABELS, Outcome, case, compared, compiled
from exchange_model import SHAPES

from tfdist.compression import Policy
from tfdist.keras_internals.scheduled_training import training_of
from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

_random = np.random.default_rng(3)
_PARTS = {name: _random.normal(size=(2, *shape)).astype("float32") for name, shape in SHAPES.items()}
_INPUTS = _random.normal(size=(96, 2)).astype("float32")
_BATCH = 8


class Linear(keras.layers.Layer):
    """A layer whose gradients depend on the inputs only."""

    def build(self, input_shape: Any) -> None:
        for name, shape in SHAPES.items():
            setattr(self, name, self.add_weight(name=name, shape=shape, initializer="zeros"))

    def call(self, inputs: Any) -> Any:
        parts = [tf.stack([tf.reduce_sum(getattr(self, name) * part) for part in _PARTS[name]]) for name in SHAPES]
        return tf.reduce_sum(inputs * tf.add_n(parts), axis=-1, keepdims=True)


def _pushed(strategy: Any) -> Outcome:
    """Compares what the servers have received, plus the residuals on the workers, with the exact gradients."""
    model = compiled(
        strategy,
        lambda: keras.optimizers.SGD(1.0),
        lambda: keras.Sequential([keras.Input((2,)), Linear(name="linear")]),
        loss=lambda y_true, y_pred: y_pred,
        metrics=lambda: [],
    )
    model.fit(_INPUTS, np.zeros((len(_INPUTS), 1)), batch_size=_BATCH, verbose=0)
    means = _INPUTS.reshape(-1, _BATCH, 2).mean(1).sum(0)
    states = training_of(model)._encoder._state
    off, kept = {}, {}
    for name in SHAPES:
        residuals = [
            np.asarray(value)
            for path, state in states.items()
            if path.endswith(f"/{name}") and "residual" in state
            for value in state["residual"].read_all()
        ]
        kept[name] = [float(np.abs(residual).max()) for residual in residuals]
        share = 0.5 if isinstance(strategy.mode, Synchronous) else 1.0  # of a worker's gradient in an update
        delivered = -getattr(model.layers[0], name).numpy()
        gradients = np.tensordot(means, _PARTS[name], 1)
        total = delivered + share * sum(residuals, start=np.zeros_like(delivered))
        off[name] = float(np.abs(total - gradients).max() / np.abs(gradients).max())
    counts = strategy.worker_stats
    return {
        "off": off,
        "kept": kept,
        "bytes": sum(count.bytes_pushed for count in counts),
        "steps": sum(count.steps for count in counts),
        "normalizers": len(training_of(model)._normalizers._functions),
    }


@case
def asynchronous_pushes(_: Path) -> Outcome:
    return _pushed(ParameterServerStrategy(compression=exchange_model.policy()))


@case
def synchronous_pushes(_: Path) -> Outcome:
    return _pushed(ParameterServerStrategy(mode=Synchronous(), compression=exchange_model.policy()))


METHODS = {"int8": "int8", "sign": "sign", "topk": "topk:0.3", "powersgd": "powersgd:2"}


@case
def methods_train(_: Path) -> Outcome:
    """One output layer per method; each must learn for its loss to fall."""
    losses = {}
    inputs = _random.normal(size=(64, 16)).astype("float32")
    targets = inputs @ _random.normal(size=(16, 16)).astype("float32")
    names = list(METHODS)
    strategy = ParameterServerStrategy(
        mode=Asynchronous(0), compression=Policy({f"{name}/": METHODS[name] for name in names}, dense_below=0)
    )

    def model() -> keras.Model:
        x = keras.Input((16,))
        return keras.Model(x, {name: keras.layers.Dense(16, use_bias=False, name=name)(x) for name in names})

    built = compiled(
        strategy,
        lambda: keras.optimizers.SGD(1.0),
        model,
        loss={name: "mse" for name in names},
        metrics=lambda: [],
    )
    data = {name: targets for name in names}
    history = built.fit(inputs, data, batch_size=32, epochs=15, verbose=0).history
    for name in names:
        losses[name] = [history[f"{name}_loss"][0], history[f"{name}_loss"][-1]]
    return losses


@tf.custom_gradient
def _rounded(value: Any) -> Any:
    return tf.cast(tf.cast(value, tf.bfloat16), tf.float32), lambda gradient: gradient


class RoundedDense(keras.layers.Dense):
    """Computes with kernel and bias rounded as a worker receives them."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        return self.activation(inputs @ _rounded(self.kernel.value) + _rounded(self.bias.value))


def _training(layer: Any) -> Any:
    def program(strategy: Any) -> Outcome:
        def model() -> keras.Model:
            keras.utils.set_random_seed(1)
            return keras.Sequential([keras.Input((6,)), layer(16, activation="relu"), layer(3)])

        built = compiled(strategy, lambda: keras.optimizers.SGD(0.1, momentum=0.9), model)
        history = built.fit(INPUTS[:84], LABELS[:84], batch_size=21, shuffle=False, verbose=0)
        return {"weights": built.get_weights(), "logs": history.history}

    return program


# Four rounds only: later, a value that is rounded differently makes a larger difference.
compared(
    "bfloat16_pull",
    lambda: ParameterServerStrategy(mode=Synchronous(), pull_dtype="bfloat16"),
    _training(keras.layers.Dense),
    _training(RoundedDense),
)
