"""Models and data for pipelines, and their comparison with one process."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from one_process import in_one_process

from tfdist.strategies import ModelParallelStrategy, Pipeline

ops, layers = keras.ops, keras.layers
rng = np.random.default_rng(0)
X = rng.normal(size=(50, 12)).astype("float32")
CLASSES = rng.integers(0, 5, 50)
VALUES = rng.normal(size=(50, 3)).astype("float32")
WEIGHTS = (rng.random(50) + 0.3).astype("float32")

SAMPLES, LENGTH, WORDS, WIDTH = 96, 6, 50, 16
TOKENS = rng.integers(1, WORDS, (SAMPLES, LENGTH))
TOKENS[:, 4:] *= rng.integers(0, 2, (SAMPLES, 2))  # some are masked
INPUTS = {"tokens": TOKENS, "features": rng.normal(size=(SAMPLES, 5)).astype("float32")}
TARGETS = {
    "words": rng.integers(0, WORDS, (SAMPLES, LENGTH)),
    "value": rng.normal(size=(SAMPLES, 1)).astype("float32"),
}
SAMPLE_WEIGHTS = {
    "words": (rng.random((SAMPLES, 1)) + 0.5).astype("float32"),
    "value": (rng.random(SAMPLES) + 0.5).astype("float32"),
}


@keras.saving.register_keras_serializable("tests")
class TiedEmbedding(layers.Embedding):
    def call(self, x: Any, reverse: bool = False) -> Any:
        return ops.matmul(x, ops.transpose(self.embeddings)) if reverse else super().call(x)

    def compute_output_spec(self, x: Any, reverse: bool = False) -> Any:
        shape = (*x.shape[:-1], self.input_dim) if reverse else (*x.shape, self.output_dim)
        return keras.KerasTensor(shape)

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return None if "float" in str(x.dtype) else super().compute_mask(x, mask)


@keras.saving.register_keras_serializable("tests")
class Penalty(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        self.add_loss(1e-3 * ops.sum(ops.abs(x)))
        return x


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [layers.Dense(16, "relu") for _ in range(4)]
        self.dropout = layers.Dropout(0.0)
        self.logits = layers.Dense(5)

    def call(self, x: Any, training: bool = False) -> Any:
        skip = x
        for index, layer in enumerate(self.hidden):
            x = layer(x)
            if index == 1:
                skip = self.dropout(x, training=training)
        return self.logits(self.dropout(ops.concatenate([x, skip * 2], -1), training=training))


def mlp(outputs: int = 5) -> keras.Model:
    return keras.Sequential(
        [keras.Input((12,)), layers.Dense(16, "relu"), layers.Dense(16, "tanh"), layers.Dense(outputs)]
    )


def transformer() -> keras.Model:
    """A tied embedding, a skip over stages, masks across cuts, losses of layers and weights, and two outputs."""
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    features = keras.Input((5,), name="features")
    embedding = TiedEmbedding(WORDS, WIDTH, mask_zero=True, name="embedding")
    embedded = embedding(tokens)
    dense = layers.Dense(WIDTH, "relu", kernel_regularizer="l2", name="dense")(features)
    x = layers.LayerNormalization(name="norm")(embedded)
    x = layers.LSTM(WIDTH, return_sequences=True, name="lstm")(x)
    x = Penalty(name="penalty")(x + ops.expand_dims(dense, 1))
    x = layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    x = layers.Add(name="skip")([x, embedded])
    value = layers.Dense(1, name="value")(layers.GlobalAveragePooling1D(name="pool")(x))
    x = layers.Dense(WIDTH, "gelu", activity_regularizer=keras.regularizers.L2(1e-3), name="up")(x)
    x = layers.LayerNormalization(name="last_norm")(x)
    return keras.Model({"tokens": tokens, "features": features}, {"words": embedding(x, reverse=True), "value": value})


def compile_classifier(model: keras.Model, optimizer: Any, **options: Any) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)


def compile_transformer(model: keras.Model, optimizer: Any) -> None:
    model.compile(
        optimizer,
        {"words": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"},
        loss_weights={"words": 1.0, "value": 0.5},
        metrics={"words": ["accuracy"], "value": ["mae"]},
        weighted_metrics={"value": ["mse"]},
    )


def strategy_of(stages: int, columns: int = 1, compression: Any = None, **options: Any) -> ModelParallelStrategy:
    devices = [f"CPU:{index}" for index in range(stages * columns)]
    pipeline = Pipeline(stages=stages, **options)
    return ModelParallelStrategy(devices, pipeline=pipeline, data_parallel=columns, compression=compression)


def made(build: Callable[[], keras.Model], compile_model: Callable[[keras.Model], Any]) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = build()
    compile_model(model)
    return model


def fit_both(
    strategy: ModelParallelStrategy,
    build: Callable[[], keras.Model],
    compile_model: Callable[[keras.Model], Any],
    x: Any = X,
    y: Any = CLASSES,
    *,
    traced: bool = False,
    **options: Any,
) -> tuple[keras.Model, keras.Model, float]:
    """Trains under the strategy and in one process. Returns the models and the largest difference of their logs.

    Args:
      strategy: of the first model.
      build: creates a model.
      compile_model: compiles it.
      x: inputs.
      y: targets.
      traced: whether one process trains in graphs, too. Eagerly, Keras weights the logged losses of several outputs by
        the sizes of the batches, as it knows them.
      **options: further arguments of `fit`.
    """
    options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0} | options
    with strategy.scope():
        model = made(build, compile_model)
    logs = model.fit(x, y, **options).history
    reference = made(build, compile_model)

    def fit(_: Any = None) -> Any:
        return reference.fit(x, y, **options).history

    expected = fit() if traced else in_one_process(fit)
    assert logs.keys() == expected.keys()
    return model, reference, max(abs(a - b) for name in logs for a, b in zip(logs[name], expected[name], strict=True))


def difference(variables: Any, expected: Any) -> float:
    pairs = zip(variables, expected, strict=True)
    return max((float(np.abs(np.float64(a.numpy()) - np.float64(b.numpy())).max()) for a, b in pairs), default=0.0)


def difference_of_columns(model: keras.Model) -> float:
    held = [variable._value for variable in [*model.variables, *model.optimizer.variables]]
    copies = [(one, copy) for one in held for copy in one.copies]
    assert copies
    return difference(*zip(*copies, strict=True))
