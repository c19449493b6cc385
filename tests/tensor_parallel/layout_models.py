"""Models whose variables are split over devices, and the layout of Megatron for them."""

from typing import Any

import keras
import numpy as np

from tfdist.strategies import ModelParallelStrategy, Pipeline

layers = keras.layers
WIDTH, LENGTH, WORDS, SAMPLES = 16, 6, 24, 40
rng = np.random.default_rng(0)
TOKENS = rng.integers(1, WORDS, (SAMPLES, LENGTH))
TOKENS[:, 4:] *= rng.integers(0, 2, (SAMPLES, 2))  # some are masked
NEXT = rng.integers(0, WORDS, (SAMPLES, LENGTH))


def layout(ways: int, **others: Any) -> Any:
    """Columns, then rows; heads; the vocabulary."""
    mesh = keras.distribution.DeviceMesh((1, ways), ["batch", "model"], devices=[f"any:{i}" for i in range(ways)])
    layout_map = keras.distribution.LayoutMap(mesh)
    rules = {
        ".*up/kernel": (None, "model"),
        ".*up/bias": ("model",),
        ".*down/kernel": ("model", None),
        ".*(query|key|value)/kernel": (None, "model", None),
        ".*(query|key|value)/bias": ("model", None),
        ".*attention_output/kernel": ("model", None, None),
        ".*embedding/embeddings": ("model", None),
        ".*logits/kernel": (None, "model"),
        ".*logits/bias": ("model",),
    }
    for path, axes in (rules | others).items():
        layout_map[path] = axes
    return layout_map


def strategy_of(ways: int, stages: int = 1, columns: int = 1, micro_batches: int = 2, **options: Any) -> Any:
    devices = [f"CPU:{index}" for index in range(ways * stages * columns)]
    pipeline = Pipeline(stages=stages, micro_batches=micro_batches)
    options = {"layout_map": layout(ways)} | options
    return ModelParallelStrategy(devices, pipeline=pipeline, data_parallel=columns, **options)


def mlp(**of_up: Any) -> keras.Model:
    x = keras.Input((12,))
    hidden = layers.Dense(8, "relu", name="first")(x)
    skip = layers.Dense(8, name="down")(layers.Dense(16, "gelu", name="up", **of_up)(hidden))
    return keras.Model(x, layers.Dense(5, name="head")(layers.Add()([hidden, skip])))


def transformer(blocks: int, dropout: float = 0.0) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True, name="embedding")(tokens)
    for block in range(blocks):
        given = layers.LayerNormalization()(x)
        # The loss does not depend on a bias of keys, and Adam makes steps of its rounding errors.
        attention = layers.MultiHeadAttention(4, 4, dropout=dropout, seed=3, name=f"attention_{block}")
        x = layers.Add()([x, attention(given, given, use_causal_mask=True)])
        given = layers.Dense(2 * WIDTH, "gelu", name=f"{block}_up")(layers.LayerNormalization()(x))
        given = layers.Dropout(dropout, seed=4)(given)
        x = layers.Add()([x, layers.Dense(WIDTH, name=f"{block}_down")(given)])
    return keras.Model(tokens, layers.Dense(WORDS, name="logits")(layers.LayerNormalization()(x)))


def without_key_biases(model: keras.Model) -> list[Any]:
    return [variable for variable in model.weights if not variable.path.endswith("key/bias")]
