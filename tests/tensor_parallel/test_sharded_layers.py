"""Layers with states, losses, random numbers and effects beside split variables equal one process."""

from typing import Any

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from layout_models import strategy_of
from pipeline_runs import difference, fit_both

pytestmark = pytest.mark.usefixtures("cpus")
layers, ops = keras.layers, keras.ops


class Stateful(layers.Layer):
    """Counts its calls, adds losses and a metric, draws numbers, and has effects that no result needs."""

    def __init__(self, tell: Any, **options: Any) -> None:
        super().__init__(**options)
        self.tell, self.mean = tell, keras.metrics.Mean(name="seen")
        self.generator = keras.random.SeedGenerator(4)

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if isinstance(x, tf.Tensor):  # not a symbolic one
            tf.py_function(lambda value: self.tell(float(value)), [tf.reduce_sum(x)], [])
            with tf.control_dependencies([tf.debugging.assert_less(x, 1e6)]):
                x = tf.identity(x)
        if training:
            self.calls.assign_add(1.0)
            self.mean.update_state(x)
            x = x * (1.0 + 0.1 * keras.random.uniform((16,), seed=self.generator))
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        return x


def test_states_losses_and_effects() -> None:
    seen: list[list[float]] = []

    def build() -> keras.Model:
        x = keras.Input((12,))
        seen.append([])
        hidden = layers.BatchNormalization(name="norm")(layers.Dense(16, "gelu", name="up")(x))
        hidden = Stateful(seen[-1].append, name="stateful")(hidden)
        hidden = layers.GaussianNoise(0.1, seed=3)(layers.Dense(8, name="down")(hidden))
        return keras.Model(x, layers.Dense(5)(hidden))

    strategy = strategy_of(2, micro_batches=1)
    model, reference, logs = fit_both(
        strategy, build, lambda m: runs.compile_classifier(m, keras.optimizers.Adam(0.01))
    )
    assert difference(model.variables, reference.variables) <= 1e-5 and logs <= 1e-5
    calls = [one for one in model.variables if one.path.endswith("calls")]
    assert float(calls[0].numpy()) == 12 and len(seen[1]) == 12  # batches
    # Each device of the stage computes the layer.
    np.testing.assert_allclose(sorted(seen[0]), sorted([*seen[1], *seen[1]]), rtol=1e-4)
    with pytest.raises(tf.errors.OpError):
        model.fit(np.full((4, 12), np.nan, "float32"), runs.CLASSES[:4], verbose=0)


class Positions(layers.Layer):
    def __init__(self, table: str, **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(models.LENGTH, 8, name=table)

    def build(self, shape: Any) -> None:
        self.table.build()

    def call(self, x: Any) -> Any:
        return x + self.table(ops.arange(models.LENGTH))


def test_positions_are_looked_up_once_a_batch() -> None:
    """Adam squares the sum of their rows over all micro-batches."""

    def build() -> keras.Model:
        x = keras.Input((models.LENGTH, 8))
        hidden = Positions("embedding")(Positions("whole")(x))  # the layout splits "embedding"
        hidden = layers.Dense(8, name="down")(layers.Dense(16, "gelu", name="up")(hidden))
        return keras.Model(x, layers.Dense(5, name="head")(layers.Flatten()(hidden)))

    x = models.rng.normal(size=(48, models.LENGTH, 8)).astype("float32")
    model, reference, logs = fit_both(
        strategy_of(2, micro_batches=2),
        build,
        lambda m: runs.compile_classifier(m, keras.optimizers.Adam(0.01)),
        x,
        runs.CLASSES[:48],
    )
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-6


class Lookup(layers.Layer):
    """Looks up rows of its own table, which a layout may split: the layer gets all of it."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(models.WORDS, 8), initializer="uniform", name="table")

    def call(self, x: Any) -> Any:
        return ops.take(self.table, x, axis=0)


def test_recurrent_and_rematerialized_layers() -> None:
    """They get complete variables."""
    modes = iter(["full", None])

    def build() -> keras.Model:
        x = keras.Input((models.LENGTH,), dtype="int32")
        hidden = layers.LSTM(8, return_sequences=True, name="lstm")(Lookup(name="lookup")(x))
        with keras.RematScope(mode=next(modes)):
            hidden = layers.MultiHeadAttention(2, 4, name="attention")(hidden, hidden)
            hidden = layers.Dense(16, "gelu", name="up")(hidden)
        hidden = layers.GRU(8, name="gru")(layers.Dense(8, name="down")(hidden))
        return keras.Model(x, layers.Dense(5)(hidden))

    more = {
        "lookup/table": ("model", None),
        "lstm/lstm_cell/kernel": (None, "model"),
        "lstm/lstm_cell/bias": ("model",),
        "gru/gru_cell/recurrent_kernel": ("model", None),
    }
    strategy = strategy_of(2, layout_map=models.layout(2, **more))
    optimizer = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    x, y = models.TOKENS, runs.CLASSES[: models.SAMPLES]
    with pytest.warns(UserWarning, match="Rematerialized layers keep their intermediate results"):
        model, reference, logs = fit_both(strategy, build, lambda m: runs.compile_classifier(m, optimizer()), x, y)
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5


def test_losses_of_layers_on_gathered_and_elementwise_values() -> None:
    """Sums and means over samples are followed through exchanges; regularizers of outputs get complete values."""

    def build() -> keras.Model:
        x = keras.Input((12,))
        hidden = runs.Penalty()(layers.Dense(16, "gelu", name="up", activity_regularizer="l2")(x))
        hidden = layers.Activation("tanh", activity_regularizer="l2")(layers.Dense(16, name="x_up")(hidden))
        hidden = layers.Dense(8, name="down")(layers.Dropout(0.0, activity_regularizer="l1")(hidden))
        return keras.Model(x, layers.Dense(5)(runs.Penalty()(hidden)))

    compile_model = lambda m: runs.compile_classifier(  # noqa: E731
        m, keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    )
    # With as many samples in a micro-batch as features, a layer's own loss would be ambiguous, with a warning.
    model, reference, logs = fit_both(strategy_of(2, 2), build, compile_model, batch_size=22)
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]  # swaps parts, where they are
    for one in (model, reference):
        one.fit(runs.X, runs.CLASSES, batch_size=22, shuffle=False, verbose=0, callbacks=callbacks)
    assert difference(model.weights, reference.weights) <= 1e-5


def test_ids_beyond_the_words_are_errors() -> None:
    with strategy_of(2).scope():
        x = keras.Input((2,), dtype="int32")
        model = keras.Model(x, layers.Dense(5)(layers.Flatten()(layers.Embedding(6, 4, name="embedding")(x))))
        runs.compile_classifier(model, "sgd")
    model.fit(np.array([[0, 5], [3, 2]]), np.array([1, 2]), verbose=0)
    negative, positive = (model.predict(np.array([[0, number], [3, 2]]), verbose=0) for number in (-1, 5))
    np.testing.assert_array_equal(negative, positive)  # as `keras.ops.take`
    with pytest.raises(tf.errors.OpError):
        model.fit(np.array([[0, 6], [3, 2]]), np.array([1, 2]), verbose=0)
