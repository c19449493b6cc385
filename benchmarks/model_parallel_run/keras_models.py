"""The models of the comparison in Keras, on TensorFlow or JAX; `torch_models.py` has them in PyTorch."""

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
    x = layers.Embedding(sizes.vocabulary, width, name="embedding")(tokens)
    x = PositionEmbedding()(x)
    for number in range(sizes.blocks):
        y = layers.LayerNormalization(epsilon=1e-5, name=f"norm_{number}")(x)
        attention = layers.MultiHeadAttention(sizes.heads, width // sizes.heads, name=f"attention_{number}")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(epsilon=1e-5)(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"up_{number}")(y)
        x = x + layers.Dense(width, name=f"down_{number}")(y)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(tokens, layers.Dense(sizes.vocabulary, name="logits")(x))


def tensor_layout(devices: list[str]) -> keras.distribution.LayoutMap:
    """Returns the layout of Megatron-LM for the transformer: what tfdist and Keras on JAX are both given."""
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ["batch", "model"], devices=devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout["embedding/embeddings"] = ("model", None)
    layout["attention_[0-9]*/(query|key|value)/kernel"] = (None, "model", None)
    layout["attention_[0-9]*/(query|key|value)/bias"] = ("model", None)
    layout["attention_[0-9]*/attention_output/kernel"] = ("model", None, None)
    layout["(up_[0-9]*|logits)/kernel"] = (None, "model")
    layout["(up_[0-9]*|logits)/bias"] = ("model",)
    layout["down_[0-9]*/kernel"] = ("model", None)
    return layout
