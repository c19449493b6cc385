"""A model whose variables are split over the devices of its stages learns the same weights as in one process."""

import warnings
from typing import Any

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from layout_models import strategy_of
from pipeline_runs import difference, fit_both

from tfdist.keras_internals.placed_variables import NewValue, held_variable
from tfdist.strategies import ModelParallelStrategy, Pipeline
from tfdist.tensor_parallel.split_variable import SplitVariable

pytestmark = pytest.mark.usefixtures("cpus")


def _split(variables: Any) -> list[Any]:
    return [one for one in variables if isinstance(held_variable(one), SplitVariable)]


def _largest_difference_of_copies(model: keras.Model) -> float:
    variables = [one for one in [*model.weights, *model.optimizer.variables] if one not in _split([one])]
    found = [np.abs(c.numpy() - one.numpy()).max() for one in variables for c in held_variable(one).copies]
    return float(max(found))


def test_two_columns_of_two_devices() -> None:
    strategy = strategy_of(ways=2, columns=2)
    model, reference, logs = fit_both(
        strategy,
        models.mlp,
        lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)),
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-6
    assert len(_split(model.weights)) == 3 and len(_split(model.optimizer.variables)) == 3  # momenta
    shapes = {one.path: [tuple(part.shape) for part in held_variable(one).shards] for one in _split(model.weights)}
    assert shapes == {"up/kernel": [(8, 8)] * 4, "up/bias": [(8,)] * 4, "down/kernel": [(8, 8)] * 4}
    assert _largest_difference_of_copies(model) == 0.0
    for one in _split(model.weights):  # the columns
        shards = held_variable(one).shards
        np.testing.assert_array_equal(shards[0].numpy(), shards[2].numpy())
        np.testing.assert_array_equal(shards[1].numpy(), shards[3].numpy())
        assert [part.device for part in shards] == [column[0] for column in strategy.columns]


def test_export_is_rejected(tmp_path: Any) -> None:
    with strategy_of(2).scope():
        model = models.mlp()
        runs.compile_classifier(model, "sgd")
    model.fit(runs.X, runs.CLASSES, verbose=0)
    with pytest.raises(ValueError, match="cannot be exported"):
        model.export(tmp_path / "exported", verbose=False)


def _compile(model: keras.Model) -> None:
    runs.compile_classifier(model, keras.optimizers.Adam(1e-2))


@pytest.mark.parametrize(
    ("ways", "stages", "blocks"),
    [(2, 1, 1), pytest.param(4, 1, 2, marks=pytest.mark.long), pytest.param(2, 2, 2, marks=pytest.mark.long)],
)
def test_transformer(ways: int, stages: int, blocks: int, tmp_path: Any) -> None:
    """With one micro-batch also dropout has the masks of one process."""
    strategy = strategy_of(ways, stages, micro_batches=1)
    options = {"batch_size": 16, "epochs": 3}
    model, reference, logs = fit_both(
        strategy, lambda: models.transformer(blocks, dropout=0.3), _compile, models.TOKENS, models.NEXT, **options
    )
    assert reference.optimizer.iterations.numpy() == 9
    assert difference(models.without_key_biases(model), models.without_key_biases(reference)) <= 1e-5
    assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-5 and logs <= 1e-5
    assert _largest_difference_of_copies(model) == 0.0
    arguments = (models.TOKENS, models.NEXT)
    np.testing.assert_allclose(model.evaluate(*arguments, verbose=0), reference.evaluate(*arguments, verbose=0), 1e-5)

    # Each of `blocks` has two sums forward and two backward, the embedding one forward and the output one backward.
    rows = models.SAMPLES * models.LENGTH * 3
    one_sum = rows * models.WIDTH * 4 * 2 * (ways - 1) // ways
    # Of the output: the largest logit and its index, then the sum of exponentials and the logit of the target.
    of_output = rows * (2 + 2) * 4 * (ways - 1)
    links = strategy.communication_by_link("train_step")
    within = [links[source, target] for source, target in links if _stage(strategy, source) == _stage(strategy, target)]
    sums = 2 * blocks + 1
    assert sum(link.activation_bytes for link in within) == (sums * one_sum + of_output) * ways
    assert sum(link.activation_gradient_bytes for link in within) == sums * one_sum * ways

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert difference(loaded.weights, model.weights) == 0.0
    assert difference(loaded.optimizer.variables, model.optimizer.variables) == 0.0
    before = [one.numpy() for one in model.weights]
    model.set_weights([np.zeros_like(one) for one in before])
    assert max(float(np.abs(one.numpy()).max()) for one in model.weights) == 0.0
    model.load_weights(tmp_path / "model.keras")
    assert difference(model.weights, loaded.weights) == 0.0
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "checkpoint")
    model.set_weights([np.zeros_like(one) for one in before])
    checkpoint.restore(path)
    assert difference(model.weights, loaded.weights) == 0.0


def _stage(strategy: Any, device: str) -> int:
    return next(column.index(device) for column in strategy.columns if device in column)


def test_layers_that_need_complete_variables() -> None:
    """A layout may split anything: other layers get complete variables, and whole values."""

    def build() -> keras.Model:
        x = keras.Input((12,))
        hidden = keras.layers.Dense(16, "softmax", name="up")(x)  # not elementwise
        hidden = keras.layers.LayerNormalization(name="norm")(keras.layers.Dense(16, name="columns")(hidden))
        hidden = keras.layers.Conv1D(8, 3, name="conv")(keras.layers.Reshape((8, 2))(hidden))
        hidden = keras.layers.Flatten()(hidden)
        return keras.Model(x, keras.layers.Dense(5, name="down")(hidden))

    more = {"columns/kernel": (None, "model"), "conv/kernel": (None, None, "model"), "norm/gamma": ("model",)}
    strategy = strategy_of(2, layout_map=models.layout(2, **more))
    model, reference, logs = fit_both(
        strategy, build, lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1, 0.9, weight_decay=0.01))
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    assert len(_split(model.weights)) == 6


def test_grouped_attention_and_einsum() -> None:
    """Biases and the output of attention are whole; inputs are split where whole ones are needed, and vice versa."""
    x = models.rng.normal(size=(48, 6, 8)).astype("float32")
    rules = {
        "(up|attention/(query|key|value))/kernel": (None, "model", None),
        "down/kernel": ("model", None, None),
        "wide/kernel": (None, "model"),
        "head/kernel": ("model", None),
    }
    layout = keras.distribution.LayoutMap(models.layout(2).device_mesh)
    for path, axes in rules.items():
        layout[path] = axes

    def build() -> keras.Model:
        given = keras.Input((6, 8))
        attention = keras.layers.GroupQueryAttention(4, 4, 2, dropout=0.2, seed=1, name="attention")(given, given)
        options = {"output_shape": (None, 4, 4), "bias_axes": "de", "activation": "gelu"}
        hidden = keras.layers.EinsumDense("abc,cde->abde", name="up", **options)(attention)
        hidden = keras.layers.EinsumDense("abde,dec->abc", (None, 8), bias_axes="c", name="down")(hidden)
        hidden = keras.layers.EinsumDense("...x,xy->...y", 16, bias_axes="y", name="wide")(hidden)
        return keras.Model(
            given, keras.layers.Dense(5, name="head")(keras.layers.Flatten()(keras.layers.Reshape((6, 16))(hidden)))
        )

    strategy = strategy_of(2, layout_map=layout, micro_batches=1)
    optimizer = lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)  # noqa: E731
    model, reference, logs = fit_both(
        strategy, build, lambda m: runs.compile_classifier(m, optimizer()), x, runs.CLASSES[:48]
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    assert len(_split(model.weights)) == 7


class _OwnOptimizer(keras.optimizers.SGD):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient - keras.ops.mean(gradient), variable, learning_rate)


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (lambda: _OwnOptimizer(0.1), {}, "_OwnOptimizer with a layout map; what it needs is not known"),
        ("sgd", {"kernel_constraint": "max_norm"}, "needs all of it"),
        ("sgd", {"kernel_regularizer": "orthogonal_regularizer"}, "needs all of it"),
    ],
)
def test_what_is_rejected(optimizer: Any, options: dict[str, Any], message: str) -> None:
    with strategy_of(2).scope():
        model = models.mlp(**options)
        runs.compile_classifier(model, optimizer() if callable(optimizer) else optimizer)
    with pytest.raises(ValueError, match=message):
        model.fit(runs.X, runs.CLASSES, verbose=0)


def test_summary_shows_what_is_sent() -> None:
    more = {"conv/kernel": (None, None, "model")}
    strategy = strategy_of(2, layout_map=models.layout(2, **more))
    x = keras.Input((models.LENGTH, 8))
    hidden = keras.layers.Conv1D(8, 3, padding="same", name="conv")(x)
    hidden = keras.layers.MultiHeadAttention(2, 4, name="attention")(hidden, hidden)
    hidden = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, "gelu", name="up")(hidden))
    lines: list[str] = []
    strategy.summary(keras.Model(x, keras.layers.Dense(4, name="logits")(hidden)), lines.append)
    table = [line.split() for line in lines[lines.index(next(one for one in lines if "devices share" in one)) :]]
    assert " ".join(table[0]) == "2 devices share each stage: 13 of 16 variables are split"
    one_sum = models.LENGTH * 8 * 4
    cells = {row[0]: row[1:] for row in table[3:]}
    assert cells["conv"] == ["complete", "0", "B", "0", "B", str(3 * 8 * 4 * 4), "B"]
    assert cells["attention"] == ["split", str(2 * one_sum), "B", "0", "B", "0", "B"]
    assert cells["up"] == cells["down"] == ["split", str(one_sum), "B", "0", "B", "0", "B"]
    assert cells["logits"] == ["split", str(one_sum), "B", "0", "B", "0", "B"]
    assert lines[-2].endswith("gathered for each micro-batch: conv")
    assert lines[-1].startswith("output logits is split")


def test_regularizers() -> None:
    def build() -> keras.Model:
        return models.mlp(kernel_regularizer="l2", bias_regularizer="l1")

    model, reference, logs = fit_both(
        strategy_of(2), build, lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1)), epochs=2
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


def test_number_of_devices() -> None:
    with pytest.raises(ValueError, match="2 devices for each stage"):
        ModelParallelStrategy(["CPU:0"], pipeline=Pipeline(stages=1), layout_map=models.layout(2))


def test_invalid_layouts() -> None:
    with pytest.raises(ValueError, match="Invalid `layout_map`"):
        strategy_of(2, layout_map={"kernel": ("model",)})
    with strategy_of(2, layout_map=models.layout(2, **{"head/kernel": (None, None, "model")})).scope():
        model = models.mlp()
        runs.compile_classifier(model, "sgd")
    with pytest.raises(ValueError, match="does not fit its variable"):
        model.fit(runs.X, runs.CLASSES, verbose=0)


def test_keys_that_match_nothing() -> None:
    layout = keras.distribution.LayoutMap(models.layout(2).device_mesh)
    layout["up/kernel"], layout[".*down/kernel"], layout["other"] = (None, "model"), ("model", None), (None, None)
    layout["up/output"] = (None, "model")
    with strategy_of(2, layout_map=layout).scope():
        model = keras.Sequential(
            [keras.Input((12,)), keras.layers.Dense(8, name="up"), keras.layers.Dense(6, name="down")]
        )
        runs.compile_classifier(model, "sgd")
    with pytest.warns(UserWarning, match=r"match no variable.* Received: \['up/kernel'\]"):
        model.fit(runs.X, runs.CLASSES, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.evaluate(runs.X, runs.CLASSES, verbose=0)


def test_variables_are_created_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the values of one process, before it is known which stage they belong to; slots without complete values."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(5)
        generator = keras.random.SeedGenerator(3)
        x = keras.Input((12,))
        options = {"kernel_initializer": keras.initializers.RandomNormal(seed=generator), "bias_initializer": "ones"}
        hidden = keras.layers.Dense(8, name="down", **options)(keras.layers.Dense(16, "gelu", name="up", **options)(x))
        return keras.Model(x, keras.layers.Dense(12, name="logits", kernel_initializer="orthogonal")(hidden))

    strategy, reference = strategy_of(2, 2), build()
    with strategy.scope():
        model = build()
    assert [tuple(one.shape) for one in _split(model.weights)] == [(12, 16), (16,), (16, 8), (8, 12), (12,)]
    assert difference(model.weights, reference.weights) == 0.0
    for one in _split(model.weights):
        assert len({part.device for part in held_variable(one).shards}) == 2
    with monkeypatch.context() as here:
        here.delattr(NewValue, "read_value")  # the complete value
        with strategy.scope():
            model.compile(keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25, use_ema=True), "mse")
            model.optimizer.build(model.trainable_variables)
    assert len(_split(model.optimizer.variables)) == 10
    assert {float(one.numpy().ravel()[0]) for one in _split(model.optimizer.variables)} == {0.0, 0.25}
    held = {one.path: held_variable(one) for one in _split([*model.variables, *model.optimizer.variables])}
    model.set_weights([one.numpy() * 2 for one in model.weights])
    assert difference(model.weights, [tf.Variable(2 * one.numpy()) for one in reference.weights]) == 0.0
    model.fit(runs.X, runs.X, batch_size=25, shuffle=False, verbose=0)
    reference.set_weights([one.numpy() * 2 for one in reference.weights])
    reference.compile(keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25, use_ema=True), "mse")
    reference.fit(runs.X, runs.X, batch_size=25, shuffle=False, verbose=0)
    assert difference(model.weights, reference.weights) <= 1e-6
    assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-5  # sums of squares up to 40
    of_stage = [{column[stage] for column in strategy.columns} for stage in range(2)]
    for one in _split([*model.variables, *model.optimizer.variables]):
        assert held_variable(one) is held[one.path]
        assert {part.device for part in held[one.path].shards} == of_stage["up" not in one.path]
