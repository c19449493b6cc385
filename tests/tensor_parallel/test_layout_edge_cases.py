"""Layers whose split values could be mistaken for whole ones: weights and logs are those of one process."""

from typing import Any

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from layout_models import strategy_of
from pipeline_runs import difference, fit_both

from tfdist.tensor_parallel.sharded_layers import is_elementwise_function

layers, ops = keras.layers, keras.ops
pytestmark = pytest.mark.usefixtures("cpus")
X = models.rng.normal(size=(48, 6, 8)).astype("float32")
CLASSES = runs.CLASSES[:48]
HEADS, COLUMNS, ROWS = (None, "model", None), (None, "model"), ("model", None)


def _layout(rules: dict[str, Any]) -> Any:
    layout = keras.distribution.LayoutMap(models.layout(2).device_mesh)
    for path, axes in rules.items():
        layout[path] = axes
    return layout


def _check(rules: dict[str, Any], build: Any, compile_model: Any, x: Any = X, y: Any = CLASSES) -> keras.Model:
    """Trains for two epochs. What is compared differs by 1e-3 and more if a part is taken for the whole."""
    strategy = strategy_of(2, layout_map=_layout(rules))
    model, reference, logs = fit_both(strategy, build, compile_model, x, y, epochs=2)
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    return model


def _classify(model: keras.Model) -> None:
    runs.compile_classifier(model, keras.optimizers.SGD(0.1))


def test_contractions_of_other_axes() -> None:
    """Kernels and biases that are whole beside a split axis, and equations with axes after the letters."""

    def build() -> keras.Model:
        x = keras.Input((6, 8))
        hidden = layers.EinsumDense("bsc,cde->bsde", (6, 4, 4), bias_axes="e", name="up")(x)
        hidden = layers.Dense(4, name="whole")(hidden)
        other = layers.EinsumDense("bsc,cde->bsde", (6, 4, 4), bias_axes="se", name="other")(x)
        other = layers.Dense(4, name="columns")(other)
        hidden = layers.EinsumDense("ab...,bc->ac...", (4,), name="after")(layers.Add()([hidden, other]))
        return keras.Model(x, layers.Dense(5, name="head")(layers.Flatten()(hidden)))

    _check({"(up|other)/kernel": HEADS, "(columns|after)/kernel": COLUMNS}, build, _classify)


def test_activity_regularizers() -> None:
    def build() -> keras.Model:
        x, penalty = keras.Input((6, 8)), keras.regularizers.L2(0.1)
        hidden = layers.Dense(8, name="up")(layers.Flatten()(x))
        hidden = layers.Activation("tanh", activity_regularizer=penalty)(hidden)
        hidden = layers.Dropout(0.0, activity_regularizer=penalty)(layers.Dense(8, name="next")(hidden))
        hidden = layers.Softmax(activity_regularizer=penalty)(layers.Dense(8, name="last")(hidden))
        return keras.Model(x, layers.Dense(5, name="head")(hidden))

    _check({"(up|next|last)/kernel": COLUMNS}, build, _classify)


def test_activations_that_depend_on_the_width() -> None:
    assert not is_elementwise_function(lambda x: x * x.shape[-1] ** -0.5)
    assert not is_elementwise_function(lambda x: x / ops.cast(ops.shape(x)[-1], x.dtype))
    assert is_elementwise_function(lambda x: ops.maximum(x, 0.1 * x))


def test_negative_and_unknown_ids() -> None:
    """Keras counts negative ids from the end; unknown ones are an error on CPUs."""

    def build() -> keras.Model:
        tokens = keras.Input((6,), dtype="int32")
        return keras.Model(tokens, layers.Dense(5)(layers.Flatten()(layers.Embedding(12, 4, name="words")(tokens))))

    ids = models.rng.integers(-12, 12, (48, 6))
    model = _check({"words/embeddings": ROWS}, build, _classify, ids)
    for unknown in (12, -13):
        with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)):
            model.predict(np.full((16, 6), unknown), verbose=0)


class Compare(layers.Layer):
    """Multiplies by a layer, depends on the width of hidden values, and uses scores of attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up, self.gate = layers.Dense(8, name="up"), layers.Dense(8, "silu", name="gate")
        self.multiply, self.down = layers.Multiply(name="multiply"), layers.Dense(4, name="down")
        self.wide, self.narrow = layers.Dense(8, name="wide"), layers.Dense(4, name="narrow")
        self.attention = layers.MultiHeadAttention(4, 4, name="attention")
        self.scored = layers.MultiHeadAttention(4, 4, name="scored")

    def build(self, shape: Any) -> None:
        for layer in (self.up, self.gate, self.wide):
            layer.build(shape)
        self.down.build((*shape[:-1], 8))
        self.narrow.build((*shape[:-1], 8))
        self.attention.build(shape, shape)
        self.scored.build(shape, shape)

    def call(self, x: Any) -> Any:
        gated = self.down(self.multiply([self.up(x), self.gate(x)]))
        wide = self.wide(x)
        narrow = self.narrow(wide) * wide.shape[-1] ** -0.5
        mean = ops.mean(self.attention(x, x), -1, keepdims=True)
        attended, scores = self.scored(x, x, return_attention_scores=True)
        return ops.concatenate([gated, narrow, attended * mean, ops.mean(ops.exp(scores), 1)], -1)


@pytest.mark.long
def test_values_that_a_layer_of_layers_uses_otherwise() -> None:
    def build() -> keras.Model:
        x = keras.Input((6, 8))
        return keras.Model(x, layers.Dense(5, name="head")(layers.Flatten()(Compare(name="compare")(x))))

    rules = {
        ".*/(up|gate|wide)/kernel": COLUMNS,
        ".*/(down|narrow)/kernel": ROWS,
        ".*/(query|key|value)/kernel": HEADS,
        ".*/attention/attention_output/kernel": (None, None, "model"),
        ".*/scored/attention_output/kernel": ("model", None, None),
    }
    _check(rules, build, _classify)


class OwnLoss(keras.Model):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_gathered_probabilities_keep_their_logits() -> None:
    """Of probabilities that are zero, no loss can be computed."""

    def build() -> keras.Model:
        x = keras.Input((6, 8))
        initializer = keras.initializers.RandomNormal(stddev=10.0, seed=1)
        scores = layers.Dense(6, kernel_initializer=initializer, name="scores")(layers.Flatten()(x))
        return OwnLoss(x, layers.Softmax()(scores))

    compile_model = lambda m: m.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")  # noqa: E731
    _check({"scores/kernel": COLUMNS}, build, compile_model)


def test_loops_of_layers() -> None:
    """The gradient of a loop changes the loop."""

    def build() -> keras.Model:
        x = keras.Input((6, 8))
        return keras.Model(x, layers.Dense(5, name="head")(layers.GRU(4)(layers.Dense(8, "tanh", name="up")(x))))

    _check({"up/kernel": COLUMNS}, build, _classify)


class Positions(layers.Layer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = layers.Embedding(6, 8, name="split"), layers.Embedding(6, 8, name="whole")

    def build(self, shape: Any) -> None:
        self.first.build((6,))
        self.second.build((6,))

    def call(self, x: Any) -> Any:
        return x + self.first(ops.arange(6)) + self.second(ops.arange(6))


def test_positions_and_variables_of_activations() -> None:
    """Adam squares the rows of a table of positions once a batch. The slopes of PReLU are used beside split values."""

    def build() -> keras.Model:
        slopes = [layers.PReLU(keras.initializers.Constant(0.2), name=f"slopes_{index}") for index in range(2)]
        x = keras.Input((6, 8))
        hidden = layers.Dense(8, activation=slopes[0], name="up")(Positions(name="positions")(x))
        return keras.Model(x, layers.Dense(5, name="head")(slopes[1](layers.Flatten()(hidden))))

    rules = {
        ".*/split/embeddings": ROWS,
        "up/kernel": COLUMNS,
        ".*slopes_0/alpha": COLUMNS,
        "slopes_1/alpha": ("model",),
    }
    optimizer = lambda: keras.optimizers.Adam(1e-2, epsilon=1e-4)  # noqa: E731  # for steps of rounding errors
    _check(rules, build, lambda m: runs.compile_classifier(m, optimizer()))


def test_a_first_stage_whose_layers_are_frozen() -> None:
    """As in fine-tuning: no gradient is computed in it, and none is sent to it."""

    def build() -> keras.Model:
        model = models.transformer(1)
        for layer in model.layers[:4]:
            layer.trainable = False
        return model

    def compile_model(model: keras.Model) -> None:
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)

    strategy = strategy_of(2, stages=2)
    model, reference, logs = fit_both(strategy, build, compile_model, models.TOKENS, models.NEXT, epochs=2)
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
