"""The models and data of the benchmarks: a CNN, an MLP of 10 M parameters, a text transformer; an LSTM and a GAN.

The layers of the first three have exact equivalents in PyTorch. The loss is the mean of
`SparseCategoricalCrossentropy(from_logits=True)` over all predictions; the GAN has its own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import text_data
from gan_model import GAN

CLASSES = 10
IMAGE_SHAPE = (32, 32, 3)
MLP_INPUTS = 784
VOCABULARY_SIZE = 8000
SEQUENCE = 64


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Attributes:
        name: Key in `WORKLOADS`.
        batch_size: Of one worker.
        build: Builds the model without compiling it; its outputs are logits.
        batch: Given an index, returns the inputs and integer labels of that batch, always the same.
    """

    name: str
    batch_size: int
    build: Callable[[], keras.Model]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]


class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector for each position of a sequence."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the vectors, `[sequence, width]`."""
        self.positions = self.add_weight(shape=input_shape[1:], initializer="normal", name="positions")

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Returns `inputs`, `[batch, sequence, width]`, with the vectors added."""
        return inputs + self.positions


def build_cnn() -> keras.Model:
    """Builds six convolutions, as in VGG (Simonyan and Zisserman 2014), and two dense layers: 0.8 M parameters."""
    layers: list[keras.layers.Layer] = []
    for filters in (32, 64, 128):
        layers += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        layers.append(keras.layers.MaxPooling2D(2))
    layers += [keras.layers.Flatten(), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(CLASSES)]
    return keras.Sequential([keras.Input(IMAGE_SHAPE), *layers], name="cnn")


def build_mlp() -> keras.Model:
    """Builds 784-2048-2048-2048-10: 10.0 M parameters, all but 0.06 % in matrices."""
    hidden = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((MLP_INPUTS,)), *hidden, keras.layers.Dense(CLASSES)], name="mlp")


def build_transformer(
    *,
    vocabulary_size: int = VOCABULARY_SIZE,
    sequence: int = SEQUENCE,
    width: int = 128,
    blocks: int = 2,
    heads: int = 4,
) -> keras.Model:
    """Builds a decoder-only transformer with pre-normalization, after GPT-2 (Radford et al. 2019).

    Args:
        vocabulary_size: Number of tokens; the output layer is not tied to the embedding.
        sequence: Length of the inputs.
        width: Of the residual stream; the dense layers inside a block are four times as wide.
        blocks: Number of blocks of attention and dense layers.
        heads: Attention heads per block.
    """
    tokens = keras.Input((sequence,), dtype="int32")
    x = keras.layers.Embedding(vocabulary_size, width)(tokens)
    x = PositionEmbedding()(x)
    for _ in range(blocks):
        y = keras.layers.LayerNormalization(epsilon=1e-5)(x)
        x = x + keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization(epsilon=1e-5)(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        x = x + keras.layers.Dense(width)(y)
    x = keras.layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(tokens, keras.layers.Dense(vocabulary_size)(x), name="text")


def build_lstm(width: int = 256) -> keras.Model:
    """Builds a language model of one LSTM layer (Hochreiter and Schmidhuber 1997): 3.5 M parameters."""
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY_SIZE, width // 2)(tokens)
    x = keras.layers.LSTM(width, return_sequences=True)(x)
    return keras.Model(tokens, keras.layers.Dense(VOCABULARY_SIZE)(x), name="lstm")


def class_batch(index: int, *, shape: tuple[int, ...], batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws examples around a prototype of each class, with noise.

    Args:
        index: Number of the batch, also the seed.
        shape: Of an example.
        batch_size: Number of examples.

    Returns:
        float32 `[batch_size, *shape]` and int32 `[batch_size]`.
    """
    random = np.random.default_rng((1, index))
    labels = random.integers(CLASSES, size=batch_size, dtype=np.int32)
    noise = random.standard_normal((batch_size, *shape), dtype=np.float32)
    return 0.2 * _prototypes(shape)[labels] + noise, labels


def text_batch(index: int, *, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws windows of the standard library's sources, and the same windows shifted by one token, both int32."""
    train = text_data.load(VOCABULARY_SIZE).train
    return text_data.random_windows(train, seed=index, count=batch_size, length=SEQUENCE)


@functools.lru_cache
def _prototypes(shape: tuple[int, ...]) -> np.ndarray:
    """A prototype of each class: normal values; for images in squares of 4x4 pixels, which convolutions can detect."""
    random = np.random.default_rng(0)
    if len(shape) == 1:
        return random.standard_normal((CLASSES, *shape), dtype=np.float32)
    height, width, channels = shape
    coarse = random.standard_normal((CLASSES, height // 4, width // 4, channels), dtype=np.float32)
    return coarse.repeat(4, axis=1).repeat(4, axis=2)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("cnn", 32, build_cnn, functools.partial(class_batch, shape=IMAGE_SHAPE, batch_size=32)),
        Workload("mlp", 128, build_mlp, functools.partial(class_batch, shape=(MLP_INPUTS,), batch_size=128)),
        Workload("text", 16, build_transformer, functools.partial(text_batch, batch_size=16)),
        Workload("lstm", 16, build_lstm, functools.partial(text_batch, batch_size=16)),
        Workload("gan", 32, GAN, functools.partial(class_batch, shape=IMAGE_SHAPE, batch_size=32)),
    )
}
