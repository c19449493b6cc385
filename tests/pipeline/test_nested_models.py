"""Models inside of models are cut between their layers."""

from typing import Any

import keras
import numpy as np
import pipeline_runs as runs
import pytest
from pipeline_runs import difference, fit_both, layers, ops, strategy_of

pytestmark = pytest.mark.usefixtures("cpus")


@keras.saving.register_keras_serializable("nested")
class Block(keras.Model):
    """A subclassed model whose call is a graph of layers. Its first dropout never drops."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.dense, self.out = layers.Dense(units, "relu", name="dense"), layers.Dense(units, name="out")
        self.dropout = layers.Dropout(0.5)

    def call(self, x: Any, training: bool = False) -> Any:
        return x + self.out(self.dropout(self.dense(self.dropout(x, training=False)), training=False))

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"units": self.dense.units}


class Opaque(Block):
    """A subclassed model that computes something else in training."""

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(x) * 2 if training else self.out(x) + self.out(x)


def nested(is_tied: bool) -> keras.Model:
    """A backbone of dicts with masks and unknown lengths, a tower that is called twice, and models in models.

    Keras cannot load a model that shares a layer with a model inside of it, as the embedding if `is_tied`.
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    features = keras.Input((5,), name="features")
    embedding = runs.TiedEmbedding(runs.WORDS, runs.WIDTH, mask_zero=True, name="embedding")
    x = layers.LSTM(runs.WIDTH, return_sequences=True, name="lstm")(embedding(tokens))
    x = layers.Add(name="add")([x, ops.expand_dims(layers.Dense(runs.WIDTH, name="dense")(features), 1)])
    x = keras.Sequential([layers.Dense(runs.WIDTH, "gelu", name="up"), Block(runs.WIDTH, name="block")], name="mlp")(x)
    outputs = {"sequence": x, "features": ops.tanh(features)}
    backbone = keras.Model({"tokens": tokens, "features": features}, outputs, name="backbone")
    inputs = [keras.Input((runs.LENGTH,), dtype="int32", name="tokens"), keras.Input((5,), name="features")]
    tower = keras.Sequential(
        [keras.Input((5,)), layers.Dense(5, "tanh", name="first"), layers.Dense(5, name="second")], name="tower"
    )
    hidden = backbone({"features": tower(tower(inputs[1])), "tokens": inputs[0]})
    pooled = layers.GlobalAveragePooling1D(name="pool")(hidden["sequence"])
    value = layers.Dense(1, name="value")(layers.Concatenate(name="both")([pooled, hidden["features"]]))
    last = (lambda x: embedding(x, reverse=True)) if is_tied else layers.Dense(runs.WORDS, name="words")
    return keras.Model(inputs, {"words": last(hidden["sequence"]), "value": value})


@pytest.mark.parametrize(
    ("cuts", "columns"),
    [
        pytest.param(None, 1, marks=pytest.mark.long),
        (["backbone/lstm", "backbone/mlp/block/dense", "value"], 1),
        pytest.param(["mlp"], 2, marks=pytest.mark.long),
    ],
)
def test_nested_models_are_cut(cuts: list[str] | None, columns: int, tmp_path: Any) -> None:
    stages, is_saved = len(cuts or [0] * 3) + 1, bool(cuts) and columns == 1
    x = [runs.INPUTS["tokens"], runs.INPUTS["features"]]
    model, reference, logs = fit_both(
        strategy_of(stages, columns, cuts=cuts),
        lambda: nested(is_tied=not is_saved),
        lambda m: runs.compile_transformer(m, keras.optimizers.Adam(1e-3)),
        x,
        runs.TARGETS,
        batch_size=40,
        sample_weight=runs.SAMPLE_WEIGHTS,
        traced=True,
    )
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    assert [one.path for one in model.weights] == [one.path for one in reference.weights]
    lines: list[str] = []
    model.distribute_strategy.summary(model, lines.append)
    assert any("backbone/" in line for line in lines[2 : 2 + stages])  # a stage begins or ends in it
    if is_saved:
        assert "backbone/mlp/block/dense ..." in lines[4] and lines[5].split()[2] == "value"
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert difference(loaded.weights, model.weights) == 0.0
        assert [layer.name for layer in loaded.layers] == [layer.name for layer in model.layers]
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0)["value"], model.predict(x, verbose=0)["value"], atol=1e-5
        )


def test_a_nested_model_without_a_graph_stays_whole() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((12,))
        return keras.Model(inputs, layers.Dense(5)(Opaque(12, name="opaque")(inputs)))

    model, reference, _ = fit_both(strategy_of(2), build, lambda m: runs.compile_classifier(m, "sgd"))
    assert difference(model.weights, reference.weights) <= 1e-6
    with strategy_of(3).scope():
        model = runs.made(build, lambda m: runs.compile_classifier(m, "sgd"))
    with pytest.raises(ValueError, match="fewer layers than the pipeline"):
        model.fit(runs.X, runs.CLASSES, verbose=0)


def test_inputs_are_converted_as_the_nested_model_does() -> None:
    """Another dtype, another rank, and a mask that the nested model's own layers have not made."""

    def build() -> keras.Model:
        tokens = keras.Input((runs.LENGTH,), dtype="int32")
        values = keras.Input((1,), name="values")
        sequence = keras.Input((runs.LENGTH, 8), dtype="float32")
        scalars = keras.Input((), dtype="float32")
        x = layers.LSTM(8, dtype="mixed_bfloat16")(sequence)
        inner = keras.Model([sequence, scalars], x * ops.expand_dims(ops.cast(scalars, "bfloat16"), -1), name="inner")
        embedded = layers.Embedding(runs.WORDS, 8, mask_zero=True, dtype="mixed_bfloat16")(tokens)
        return keras.Model([tokens, values], layers.Dense(5)(inner([embedded, values])))

    x = [runs.TOKENS[:48], runs.INPUTS["features"][:48, :1]]
    model, reference, _ = fit_both(
        strategy_of(2, micro_batches=1), build, lambda m: runs.compile_classifier(m, "sgd"), x, runs.CLASSES[:48]
    )
    assert difference(model.weights, reference.weights) <= 1e-6


def test_arguments_that_fix_training_are_kept() -> None:
    """A subclassed model calls dropout with `training=False` in training."""

    class Fixed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.dropout, self.logits = Block(12), layers.Dropout(0.9), layers.Dense(5)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.logits(self.dropout(self.block(x, training=training), training=False))

    model, reference, _ = fit_both(strategy_of(2), Fixed, lambda m: runs.compile_classifier(m, "sgd"))
    assert difference(model.weights, reference.weights) <= 1e-6
