"""Layers inside of a layer compute on parts, as far as a trace shows that nothing else uses split values."""

from typing import Any

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest
from layout_models import strategy_of
from pipeline_runs import difference, fit_both

from tfdist.keras_internals.functional_graph import graph_of
from tfdist.strategies import auto_layout
from tfdist.tensor_parallel.composite_layers import combined_results, inner_calls
from tfdist.utils.formatting import format_bytes

layers, ops = keras.layers, keras.ops
pytestmark = pytest.mark.usefixtures("cpus")
rng = np.random.default_rng(0)


class Block(layers.Layer):
    """A block as in Keras' guides, with a Sequential inside."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(4, 4, dropout=0.2, seed=1, name="attention")
        hidden = layers.Dense(32, _approximate_gelu, name="up")
        down = layers.Dense(models.WIDTH, name="down")
        self.ffn = keras.Sequential([hidden, layers.Dropout(0.3, seed=2), down], name="ffn")
        self.first, self.second = layers.LayerNormalization(name="first"), layers.LayerNormalization(name="second")

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)
        self.ffn.build(shape)
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.first(x + self.attention(x, x, training=training))
        return self.second(x + self.ffn(x, training=training))


class Mixing(layers.Layer):
    """Its hidden values are used by code, not by layers alone; one of its layers is called twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up, self.down = layers.Dense(8, "relu", name="up"), layers.Dense(8, name="down")
        self.twice = layers.Dense(8, name="twice")

    def build(self, shape: Any) -> None:
        for layer in (self.up, self.twice):
            layer.build(shape)
        self.down.build((*shape[:-1], 8))

    def call(self, x: Any) -> Any:
        hidden = self.up(x)
        return self.down(ops.cumsum(hidden, -1)) + self.twice(x) + self.twice(hidden)


class Looping(layers.Layer):
    """Calls a layer within a loop."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.up = layers.Dense(8, "tanh", name="up")

    def build(self, shape: Any) -> None:
        self.up.build(shape)

    def call(self, x: Any) -> Any:
        return ops.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, self.up(y)), (0, x))[1]


class Tied(layers.Layer):
    """Its code uses the variable of an inner layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = layers.Embedding(8, 6, name="embedding")

    def build(self, shape: Any) -> None:
        self.embedding.build()

    def call(self, ids: Any) -> Any:
        return ops.tanh(ops.matmul(self.embedding(ids), ops.transpose(self.embedding.embeddings)))


def _approximate_gelu(x: Any) -> Any:
    return keras.activations.gelu(x, approximate=True)


def _transformer() -> keras.Model:
    tokens = keras.Input((models.LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(models.WORDS, models.WIDTH, mask_zero=True, name="embedding")
    return keras.Model(tokens, embedding(Block(name="block")(embedding(tokens)), reverse=True))


def test_a_block_exchanges_two_sums() -> None:
    """As a block that is written into the model; the tied embedding is split, too. Dropout has the same masks."""
    layout = auto_layout(_transformer(), 2)
    found = {path: layout[path].axes for path in layout}
    heads = {f"block/attention/{name}/kernel": (None, "model", None) for name in ("query", "key", "value")}
    heads |= {f"block/attention/{name}/bias": ("model", None) for name in ("query", "key", "value")}
    ffn = {
        "block/ffn/up/kernel": (None, "model"),
        "block/ffn/up/bias": ("model",),
        "block/ffn/down/kernel": ("model", None),
    }
    output = {"block/attention/attention_output/kernel": ("model", None, None)}
    assert found == {"embedding/embeddings": ("model", None)} | heads | output | ffn
    strategy = strategy_of(2, layout_map=layout, micro_batches=1)
    model, reference, logs = fit_both(
        strategy,
        _transformer,
        lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1, momentum=0.9)),
        models.TOKENS,
        models.NEXT,
        epochs=4,
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    lines: list[str] = []
    strategy.summary(model, lines.append)
    one_sum = models.LENGTH * models.WIDTH * 4
    cells = {row.split()[0]: row.split()[1:] for row in lines if " split " in row}
    four_sums = format_bytes(4 * one_sum).split()  # two forward, two backward
    assert cells["block"] == ["split", *four_sums, "0", "B", "0", "B"]
    assert lines[-1] == "output embedding stays split: loss and accuracy are computed from the parts"


class Gated(layers.Layer):
    """As the decoders of Llama (`kind` "dense") and Gemma ("einsum"), or with a weight between ("scaled")."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind
        dense = self._einsum if kind == "einsum" else layers.Dense
        self.gate, self.up, self.down = dense(16, name="gate"), dense(16, name="up"), dense(8, name="down")

    @staticmethod
    def _einsum(units: int, name: str) -> Any:
        return layers.EinsumDense("btd,df->btf", (None, units), bias_axes="f", name=name)

    def build(self, shape: Any) -> None:
        self.gate.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        gate = ops.cast(ops.silu(ops.cast(self.gate(x), "float64")), x.dtype)
        if self.kind == "scaled":
            gate = gate * self.scale
        return x + self.down(ops.multiply(0.5 * self.up(x), keras.activations.gelu(gate, approximate=True)))


@pytest.mark.parametrize("kind", ["dense", pytest.param("einsum", marks=pytest.mark.long), "scaled"])
def test_gated_blocks(kind: str) -> None:
    """Products of split values stay split, if code computes them element by element from nothing else."""

    def build() -> keras.Model:
        x = keras.Input((6, 8))
        return keras.Model(x, layers.Dense(5, name="head")(layers.Flatten()(Gated(kind, name="gated")(x))))

    x = np.random.default_rng(1).normal(size=(48, 6, 8)).astype("float32")
    layout = auto_layout(build(), 2)
    if kind == "scaled":  # whose gradient a device could not compute
        assert not list(layout)
        for name in ("gate", "up"):
            layout[f"gated/{name}/kernel"], layout[f"gated/{name}/bias"] = (None, "model"), ("model",)
        layout["gated/down/kernel"] = ("model", None)
    columns = {f"gated/{name}/{part}" for name in ("gate", "up") for part in ("kernel", "bias")}
    assert set(layout) == columns | {"gated/down/kernel"}
    strategy = strategy_of(2, layout_map=layout)
    model, reference, logs = fit_both(
        strategy, build, lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1)), x, runs.CLASSES[:48], epochs=2
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    lines: list[str] = []
    strategy.summary(model, lines.append)
    (row,) = [line.split() for line in lines if line.startswith("gated ") and line.endswith("B")]
    # One sum forward, as nothing needs the gradient of the input. In code that is not known to be elementwise a device
    # sends its part of two products forward, and one of the gradients of hidden values backward.
    one_sum, gathered = format_bytes(6 * 8 * 4).split(), format_bytes(3 * 6 * 8 * 4).split()
    assert row[2:6] == [*one_sum, *(gathered if kind == "scaled" else ["0", "B"])]


def test_what_code_uses_is_whole() -> None:
    def build() -> keras.Model:
        x = keras.Input((8,))
        ids = ops.cast(ops.clip(4 * x + 4, 0, 7), "int32")
        both = layers.Concatenate()([Mixing(name="mixing")(x), layers.Flatten()(Tied(name="tied")(ids))])
        return keras.Model(x, layers.Dense(5, name="head")(both))

    layout = keras.distribution.LayoutMap(models.layout(2).device_mesh)
    layout[".*(up|twice)/kernel"], layout[".*(up|twice)/bias"] = (None, "model"), ("model",)
    layout[".*(down/kernel|embeddings)"] = ("model", None)
    assert not list(auto_layout(build(), 2))  # no pair of layers
    strategy = strategy_of(2, layout_map=layout)
    model, reference, logs = fit_both(
        strategy, build, lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1)), runs.X[:, :8]
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    lines: list[str] = []
    strategy.summary(model, lines.append)
    assert [line.split()[1] for line in lines if line.startswith("mixing ")] == ["split"]
    assert lines[-1].endswith("gathered for each micro-batch: tied")


def test_inner_calls_of_a_layer() -> None:
    x = keras.Input((8,))
    model = keras.Model(x, layers.Dense(5)(Looping()(Mixing(name="mixing")(x))))
    mixing, looping, head = graph_of(model).calls
    assert inner_calls(head, training=True) is None and inner_calls(looping, training=True) is None
    found = inner_calls(mixing, training=True)
    assert found is not None and [one.layer.name for one in found.calls] == ["up", "down", "twice", "twice"]
    layer = mixing.operation
    assert found.only_call_of(layer.twice) is None
    up = found.only_call_of(layer.up)
    assert up is not None and combined_results(found, layer.up) is None
