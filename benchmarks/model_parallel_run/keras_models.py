"""The models of the comparison in Keras; `torch_models.py` beside this file has them in PyTorch."""

import keras
from workloads import PositionEmbedding

from model_parallel_run.pipeline_variants import SIZES, MlpSizes, TransformerSizes


def build_model(name: str) -> keras.Model:
    """Builds the model of a workload, without compiling it; its outputs are logits."""
    sizes = SIZES[name]
    return build_mlp(sizes) if isinstance(sizes, MlpSizes) else build_transformer(sizes)


def build_mlp(sizes: MlpSizes) -> keras.Model:
    """Builds dense layers with ReLU, and a layer of logits."""
    hidden = [keras.layers.Dense(sizes.width, "relu", name=f"dense_{number}") for number in range(sizes.hidden)]
    logits = keras.layers.Dense(sizes.classes, name="logits")
    return keras.Sequential([keras.Input((sizes.inputs,)), *hidden, logits])


def build_transformer(sizes: TransformerSizes) -> keras.Model:
    """Builds a decoder-only transformer with pre-normalization, as `workloads.py` does, with names for cuts."""
    layers, width = keras.layers, sizes.width
    tokens = keras.Input((sizes.sequence,), dtype="int32")
    x = layers.Embedding(sizes.vocabulary, width)(tokens)
    x = PositionEmbedding()(x)
    for number in range(sizes.blocks):
        y = layers.LayerNormalization(epsilon=1e-5, name=f"norm_{number}")(x)
        x = x + layers.MultiHeadAttention(sizes.heads, width // sizes.heads)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        y = layers.Dense(4 * width, activation="gelu")(y)
        x = x + layers.Dense(width)(y)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(tokens, layers.Dense(sizes.vocabulary)(x))
