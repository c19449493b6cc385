"""Variables whose size the number of devices does not divide: the last parts are padded, where nobody sees it."""

from pathlib import Path
from typing import Any

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from layout_models import strategy_of
from pipeline_runs import difference, fit_both

from tfdist.callbacks import FailureRecovery
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.strategies import auto_layout
from tfdist.tensor_parallel.split_variable import SplitVariable

layers, optimizers = keras.layers, keras.optimizers
pytestmark = pytest.mark.usefixtures("cpus")
WORDS = 21
TOKENS, NEXT = models.TOKENS % WORDS, models.NEXT % WORDS


def _layout(ways: int = 2) -> Any:
    return models.layout(ways, **{".*embedding/reverse_embeddings": (None, "model")})


def _build(activation: Any = None, tied: bool = False, rate: float = 0.2) -> keras.Model:
    """A vocabulary of 21 words, and hidden values of 7, of whose padding a sigmoid is not zero."""
    tokens = keras.Input((models.LENGTH,), dtype="int32")
    embedding = layers.ReversibleEmbedding(WORDS, 8, tie_weights=tied, name="embedding")
    x = embedding(tokens)
    hidden = layers.Dense(7, "sigmoid", name="up", bias_initializer="ones", kernel_regularizer="l2")(x)
    x = layers.Dense(8, name="down")(layers.Dropout(rate, seed=3)(hidden))
    if tied:
        return keras.Model(tokens, embedding(x, reverse=True))
    return keras.Model(tokens, layers.Dense(WORDS, activation, name="logits")(x))


def _padded(model: keras.Model) -> dict[str, list[tuple[int, ...]]]:
    split = {one.path: held_variable(one) for one in [*model.weights, *model.optimizer.variables]}
    split = {path: held for path, held in split.items() if isinstance(held, SplitVariable)}
    return {path: [tuple(part.shape) for part in held.shards] for path, held in split.items()}


def _paddings(model: keras.Model) -> list[np.ndarray]:
    """What the parts of weights are padded by."""
    found = []
    for held in map(held_variable, model.weights):
        if isinstance(held, SplitVariable):
            sizes = [end - begin for begin, end in map(held.bounds, range(len(held.shards)))]
            pairs = zip(held.shards, sizes, strict=True)
            found += [np.split(part.numpy(), [size], held.axis)[1] for part, size in pairs]
    return found


_LOSSES = {
    "logits": (None, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    "softmax": ("softmax", "sparse_categorical_crossentropy"),
    "smoothed": ("softmax", keras.losses.CategoricalCrossentropy(label_smoothing=0.1)),
    "gathered": ("tanh", "mse"),
    "probabilities": ("sigmoid", "categorical_crossentropy"),
}


@pytest.mark.parametrize(
    ("loss", "ways", "columns", "optimizer"),
    [
        ("logits", 4, 1, lambda: optimizers.Ftrl(0.05, initial_accumulator_value=1.0)),
        ("softmax", 2, 1, lambda: optimizers.Adagrad(0.05, weight_decay=0.1, use_ema=True)),
        *(
            pytest.param(loss, ways, columns, optimizer, marks=pytest.mark.long)
            for loss, ways, columns, optimizer in [
                ("smoothed", 2, 2, lambda: optimizers.Lamb(1e-2, weight_decay=0.1)),
                ("gathered", 2, 1, lambda: optimizers.Adafactor(1e-2)),
                ("probabilities", 2, 2, lambda: optimizers.Muon(1e-2, weight_decay=0.1)),
                ("logits", 2, 1, lambda: optimizers.RMSprop(1e-2, momentum=0.9, centered=True)),
                ("logits", 2, 2, lambda: optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=2)),
            ]
        ),
    ],
)
def test_weights_equal_those_of_one_process(loss: str, ways: int, columns: int, optimizer: Any) -> None:
    activation, function = _LOSSES[loss]
    is_sparse = "sparse" in str(function) or isinstance(function, keras.losses.SparseCategoricalCrossentropy)

    def compile_model(model: keras.Model) -> None:
        model.compile(optimizer(), function, metrics=["accuracy"])

    strategy = strategy_of(ways, columns=columns, layout_map=_layout(ways), micro_batches=1)
    y = NEXT if is_sparse else np.eye(WORDS, dtype="float32")[NEXT]
    rate = 0.2 if columns == 1 else 0.0  # of each column the masks are others
    model, reference, logs = fit_both(
        strategy, lambda: _build(activation, rate=rate), compile_model, TOKENS, y, epochs=2
    )
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-5
    np.testing.assert_allclose(model.predict(TOKENS, verbose=0), reference.predict(TOKENS, verbose=0), atol=1e-5)
    shapes = _padded(model)
    assert shapes["embedding/embeddings"] == [(-(-WORDS // ways), 8)] * ways * columns
    assert shapes["down/kernel"] == [(-(-7 // ways), 8)] * ways * columns
    if optimizer().weight_decay is None or columns == 1:  # all that pads weights stays zero
        assert not any(np.any(padding) for padding in _paddings(model))


def test_files_and_checkpoints_hold_complete_values(tmp_path: Path) -> None:
    """Also for other numbers of devices, without a strategy, and of FailureRecovery."""

    def trained(ways: int, epochs: int, directory: Path | None = None) -> keras.Model:
        strategy = tf.distribute.get_strategy() if ways == 1 else strategy_of(ways, layout_map=_layout(ways))
        with strategy.scope():
            model = runs.made(lambda: _build(tied=True), lambda m: runs.compile_classifier(m, optimizers.Adam(1e-2)))
        callbacks = [] if directory is None else [FailureRecovery(directory)]
        model.fit(TOKENS, NEXT, 16, epochs, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    model = trained(2, 1, tmp_path / "recovered")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert difference(loaded.weights, model.weights) == 0.0
    assert difference(loaded.optimizer.variables, model.optimizer.variables) == 0.0
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "checkpoint")
    other, expected = trained(4, 2, tmp_path / "recovered"), trained(2, 2)
    assert difference(other.weights, expected.weights) <= 1e-6
    assert difference(other.optimizer.variables, expected.optimizer.variables) <= 1e-6
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    assert difference(other.weights, model.weights) == 0.0
    assert difference(other.optimizer.variables, model.optimizer.variables) == 0.0
    other.load_weights(tmp_path / "model.keras")


def test_automatic_layouts_pad_vocabularies_alone() -> None:
    def layouts(words: int, hidden: int) -> dict[str, Any]:
        x = keras.Input((4,), dtype="int32")
        values = layers.Dense(8, name="down")(layers.Dense(hidden, name="up")(layers.Embedding(words, 8, name="in")(x)))
        values = layers.LayerNormalization()(values)
        found = auto_layout(keras.Model(x, layers.Dense(words, use_bias=False, name="out")(values)), 2)
        return {path: found[path].axes for path in found}

    words = {"in/embeddings": ("model", None), "out/kernel": (None, "model")}
    assert layouts(101, 31) == words
    assert layouts(9, 31) == {}  # a tenth would be padding
