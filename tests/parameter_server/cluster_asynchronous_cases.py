"""Cases of `Asynchronous`: no update or count is lost, and staleness is bounded."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cluster_cases import INPUTS, LABELS, Outcome, case, compared, compiled

from tfdist.strategies import Asynchronous, ParameterServerStrategy

STEPS, BATCH, UNITS = 400, 5, 8
STALENESS = 2


class Counting(keras.layers.Layer):
    """Counts samples, and which of the 2**UNITS dropout masks it has met; passes on its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def build(self, input_shape: Any) -> None:
        self.samples = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="samples")
        self.masks = self.add_weight(shape=(2**UNITS,), initializer="zeros", trainable=False, name="masks")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            mask = self.dropout(tf.ones([UNITS]), training=True) > 0
            number = tf.reduce_sum(tf.where(mask, 2 ** tf.range(UNITS), 0))
            self.masks.assign_add(tf.one_hot(number, 2**UNITS))
            self.samples.assign(self.samples + keras.ops.cast(keras.ops.shape(inputs)[0], "int64"))
        return inputs


def _counting() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [Counting(), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


@case
def nothing_is_lost(_: Path) -> Outcome:
    """400 updates of two workers on constant inputs."""
    strategy = ParameterServerStrategy()
    optimizer = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    seen = lambda: [keras.metrics.SparseCategoricalAccuracy(), _Samples()]  # noqa: E731
    model = compiled(strategy, optimizer, _counting, metrics=seen)
    inputs, labels = np.ones((BATCH, 6), "float32"), np.zeros(BATCH, "int64")
    data = tf.data.Dataset.from_tensors((inputs, labels)).repeat(STEPS)
    history = model.fit(data, epochs=1, verbose=0).history
    counting = model.layers[0]
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "samples": int(counting.samples.numpy()),
        "masks": counting.masks.numpy(),
        "metric": history["samples"][-1],
        "workers": [[count.steps, count.samples, count.max_staleness] for count in strategy.worker_stats],
        "names": sorted(history),
    }


class _Samples(keras.metrics.Metric):
    """Counts samples."""

    def __init__(self) -> None:
        super().__init__(name="samples")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self) -> Any:
        return self.total


def _one_at_a_time(strategy: Any) -> Outcome:
    model = compiled(strategy, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5))
    history = model.fit(INPUTS, LABELS, batch_size=21, epochs=2, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "logs": history.history}


compared("no_staleness_is_one_process", lambda: ParameterServerStrategy(mode=Asynchronous(0)), _one_at_a_time)


class Slow(keras.layers.Layer):
    """Is slow for samples that start with 9: meanwhile the other worker makes updates, if it may."""

    def call(self, inputs: Any) -> Any:
        turns = tf.where(inputs[0, 0] == 9.0, 1000, 0)
        square = tf.while_loop(
            lambda turn, _: turn < turns, lambda turn, m: (turn + 1, m @ m), (0, tf.zeros([150, 150]))
        )
        return inputs + square[1][0, 0]


@case
def bounded_staleness(_: Path) -> Outcome:
    strategy = ParameterServerStrategy(mode=Asynchronous(STALENESS))

    def model() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), Slow(), keras.layers.Dense(3)])

    built = compiled(strategy, lambda: keras.optimizers.SGD(0.001), model)
    inputs = INPUTS.copy()
    inputs[20::40, 0] = 9.0
    built.fit(inputs, LABELS, batch_size=2, shuffle=False, verbose=0)
    return {
        "staleness": [[count.staleness, count.max_staleness] for count in strategy.worker_stats],
        "steps": [count.steps for count in strategy.worker_stats],
        "iterations": int(built.optimizer.iterations.numpy()),
    }


@case
def constraints_and_overflow(_: Path) -> Outcome:
    """A pushed update is constrained, or skipped after an overflow."""
    strategy = ParameterServerStrategy()

    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
        constrained = keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.25))
        return keras.Sequential([keras.Input((6,)), constrained])

    optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=2.0**15)  # noqa: E731
    built = compiled(strategy, optimizer, model)
    inputs, labels = INPUTS[:200].copy(), LABELS[:200].copy()
    # Two large samples of a batch, equal but for their labels: whatever the weights are, one gradient overflows.
    inputs[57] = inputs[58] = [1e37, 0, 0, 0, 0, 0]
    labels[57], labels[58] = 0, 1
    built.fit(inputs, labels, batch_size=10, shuffle=False, verbose=0)
    kernel = built.layers[0].kernel.numpy()
    return {
        "norms": np.linalg.norm(kernel, axis=0),
        "finite": bool(np.isfinite(kernel).all()),
        "updates": int(built.optimizer.iterations.numpy()),
        "scale": float(built.optimizer.dynamic_scale.numpy()),
    }


class Failing(keras.Model):
    """A model whose step fails on a worker for a large label."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        tf.debugging.assert_less(data[1], tf.constant(90, tf.int64), "a label of the user's is too large")
        return super().train_step(data)


@case
def error_of_a_worker(_: Path) -> Outcome:
    """The error is raised once; then another model trains."""
    strategy = ParameterServerStrategy()
    labels = LABELS.copy()
    labels[100] = 90
    messages = []
    for own in (labels, LABELS):
        model = compiled(strategy, lambda: keras.optimizers.SGD(0.01), Failing)
        try:
            model.fit(INPUTS, own, batch_size=20, epochs=2, shuffle=False, verbose=0)
        except tf.errors.InvalidArgumentError as error:
            messages.append(str(error))
    return {"messages": messages, "iterations": int(model.optimizer.iterations.numpy())}


class FailingInPython(Failing):
    def train_step(self, data: Any) -> Any:
        return {"loss": self.no_such_attribute_of_the_user}


@case
def error_while_tracing(_: Path) -> Outcome:
    import traceback

    strategy = ParameterServerStrategy()
    model = compiled(strategy, lambda: keras.optimizers.SGD(0.01), FailingInPython)
    try:
        model.fit(INPUTS, LABELS, batch_size=20, verbose=0)
    except AttributeError:
        return {"traceback": traceback.format_exc()}
    return {"traceback": ""}
