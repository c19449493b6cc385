"""A model in stages learns the same weights as in one process."""

from typing import Any

import keras
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from pipeline_runs import difference, difference_of_columns, fit_both, strategy_of

optimizers, losses, ops, layers = keras.optimizers, keras.losses, keras.ops, keras.layers
pytestmark = pytest.mark.usefixtures("cpus")


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param(
            lambda: optimizers.SGD(0.1, momentum=0.9), {"stages": 3, "schedule": "gpipe"}, marks=pytest.mark.long
        ),
        (lambda: optimizers.Adam(1e-2), {"stages": 2, "columns": 2}),
    ],
)
def test_mlp(optimizer: Any, options: dict[str, Any]) -> None:
    strategy = strategy_of(**options)
    validation = (runs.X, runs.CLASSES)
    model, reference, logs = fit_both(
        strategy, runs.mlp, lambda m: runs.compile_classifier(m, optimizer()), epochs=5, validation_data=validation
    )
    assert reference.optimizer.iterations.numpy() == 20
    assert difference(model.weights, reference.weights) <= 1e-6
    assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-6 and logs <= 1e-5
    np.testing.assert_allclose(model.predict(runs.X, verbose=0), reference.predict(runs.X, verbose=0), atol=1e-5)
    devices = {variable.value.device for variable in model.layers[-1].weights}
    assert devices == {strategy.columns[0][-1]}
    if options.get("columns") == 2:
        assert difference_of_columns(model) == 0.0


def _averaging() -> Any:
    return optimizers.SGD(0.1, clipnorm=0.1, use_ema=True, ema_overwrite_frequency=3)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param(
            lambda: optimizers.Adam(1e-3), {"stages": 4, "cuts": ["norm", "attention", "up"]}, marks=pytest.mark.long
        ),
        (lambda: optimizers.Adam(1e-3, global_clipnorm=1.0, weight_decay=0.01), {"stages": 2, "columns": 2}),
        pytest.param(_averaging, {"stages": 2}, marks=pytest.mark.long),  # `test_optimizers` has it, too
    ],
)
def test_transformer_with_everything(optimizer: Any, options: dict[str, Any], tmp_path: Any) -> None:
    arrays = (runs.INPUTS, runs.TARGETS, runs.SAMPLE_WEIGHTS)
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(40)  # the last one has 16 samples
    model, reference, logs = fit_both(
        strategy_of(**options),
        runs.transformer,
        lambda m: runs.compile_transformer(m, optimizer()),
        data,
        None,
        batch_size=None,
        epochs=3,
        validation_data=data,
        traced=True,
    )
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    if options.get("columns") == 2:
        assert difference_of_columns(model) == 0.0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert difference(loaded.weights, model.weights) == 0.0


def _regression(loss: Any, optimizer: Any = None) -> Any:
    return lambda model: model.compile(optimizer or optimizers.SGD(1e-2), loss, metrics=["mae"])


def _masked_mean(y: Any, y_pred: Any) -> Any:
    mask = ops.cast(y > 0, "float32")
    return ops.sum(ops.square(y - y_pred) * mask) / ops.sum(mask)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (losses.MeanSquaredError(reduction="mean_with_sample_weight"), {"sample_weight": runs.WEIGHTS}),
        pytest.param(losses.MeanSquaredError(reduction="sum"), {"sample_weight": runs.WEIGHTS}, marks=pytest.mark.long),
        pytest.param(lambda y, y_pred: ops.mean(ops.square(y - y_pred)), {}, marks=pytest.mark.long),
        pytest.param(lambda y, y_pred: ops.sum(ops.square(y - y_pred)), {}, marks=pytest.mark.long),
        (_masked_mean, {}),
    ],
    ids=["weighted mean", "sum", "mean function", "sum function", "quotient"],
)
def test_losses_with_fewer_samples_than_micro_batches(loss: Any, options: dict[str, Any]) -> None:
    """The last batch has 2 samples for 3 micro-batches in each of 2 columns."""
    model, reference, logs = fit_both(
        strategy_of(2, 2, micro_batches=3), lambda: runs.mlp(3), _regression(loss), y=runs.VALUES, epochs=2, **options
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-4
    scores = [one.evaluate(runs.X, runs.VALUES, verbose=0) for one in (model, reference)]
    np.testing.assert_allclose(*scores, rtol=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=3, global_clipnorm=0.1), marks=pytest.mark.long
        ),
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(1e-2), initial_scale=2.0**8, dynamic_growth_steps=3),
        lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), loss_scale_factor=8.0),
        pytest.param(lambda: optimizers.Nadam(1e-2, clipvalue=0.01), marks=pytest.mark.long),
        pytest.param(lambda: optimizers.Muon(1e-2), marks=pytest.mark.long),
        pytest.param(_averaging, marks=pytest.mark.long),
    ],
    ids=["accumulation", "loss scale", "schedule", "nadam", "muon", "averaging"],
)
def test_optimizers(optimizer: Any) -> None:
    model, reference, _ = fit_both(
        strategy_of(2, 2),
        runs.mlp,
        lambda m: runs.compile_classifier(m, optimizer(), steps_per_execution=3),
        class_weight={0: 1.0, 1: 2.0, 2: 3.0, 3: 0.5, 4: 1.0},
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and difference_of_columns(model) == 0.0


class OwnLoss(keras.Model):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None) -> Any:
        return ops.mean(ops.square(y_pred - y)) + 0.1 * ops.mean(ops.abs(x[:, :3] - y_pred))


def test_own_loss_and_a_static_batch() -> None:
    def build() -> keras.Model:
        i = keras.Input((12,), batch_size=8)
        x = keras.layers.Dense(8, "relu")(i)
        return OwnLoss(i, keras.layers.Dense(3)(x))

    model, reference, logs = fit_both(
        strategy_of(2, micro_batches=2),
        build,
        lambda m: m.compile(optimizers.SGD(0.1), metrics=["mae"]),
        runs.X[:48],
        runs.VALUES[:48],
        batch_size=8,
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


def test_subclassed_model_is_traced() -> None:
    compile_model = lambda m: runs.compile_classifier(m, optimizers.Adam(1e-2))  # noqa: E731
    model, reference, logs = fit_both(strategy_of(3), runs.Subclassed, compile_model)
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 3])
def test_masked_losses_are_means_over_the_valid_entries_of_the_batch(stages: int) -> None:
    def build() -> keras.Model:
        tokens = keras.Input((runs.LENGTH,), dtype="int32")
        x = keras.layers.Embedding(runs.WORDS, 8, mask_zero=True)(tokens)
        x = keras.layers.LSTM(8, return_sequences=True)(x)
        first = keras.layers.Dense(runs.WORDS, name="first")(x)
        return keras.Model(tokens, [first, keras.layers.Dense(1, name="second")(keras.layers.Dropout(0.0)(x))])

    entropy = losses.SparseCategoricalCrossentropy(from_logits=True)
    model, reference, logs = fit_both(
        strategy_of(stages, 4 // stages),
        build,
        lambda m: m.compile(optimizers.Adam(1e-3), [entropy, "mse"], weighted_metrics=[["accuracy"], ["mae"]]),
        runs.TOKENS,
        [runs.TARGETS["words"], runs.INPUTS["features"][:, :1].repeat(runs.LENGTH, 1)[..., None]],
        sample_weight=[runs.SAMPLE_WEIGHTS["words"], runs.SAMPLE_WEIGHTS["value"][:, None]],
        batch_size=40,
        traced=True,
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optimizers.Adam(1e-2),
        pytest.param(lambda: optimizers.SGD(0.1, clipnorm=0.01), marks=pytest.mark.long),
    ],
    ids=["adam", "clipnorm"],
)
def test_rows_of_a_shared_table_are_added_as_in_one_process(optimizer: Any) -> None:
    """Ids occur several times in a batch. One process looks up the positions once, each micro-batch once more."""

    def build() -> keras.Model:
        ids = keras.Input((6,), dtype="int32")
        x = layers.Embedding(7, 8, mask_zero=True)(ids) + Positions()(ids)
        return keras.Model(ids, layers.Dense(5)(layers.LSTM(9)(x)))

    ids = np.random.default_rng(0).integers(0, 7, (50, 6))
    compile_model = lambda m: runs.compile_classifier(m, optimizer())  # noqa: E731
    model, reference, _ = fit_both(strategy_of(2, 2), build, compile_model, ids)
    assert difference(model.weights, reference.weights) <= 1e-6


class Positions(layers.Layer):
    """Embeds positions, as Keras' transformer example does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(6, 8)

    def call(self, ids: Any) -> Any:
        return self.table(ops.arange(0, ops.shape(ids)[-1], 1))

    def compute_output_spec(self, ids: Any) -> Any:
        return keras.KerasTensor((6, 8))


@pytest.mark.long
def test_sums_of_many_columns_are_sliced_and_casts_stay_close() -> None:
    build = lambda: keras.Sequential([keras.Input((12,)), keras.layers.Dense(2048), keras.layers.Dense(5)])  # noqa: E731
    compile_model = lambda m: runs.compile_classifier(m, optimizers.SGD(1e-2))  # noqa: E731
    for compression, limit in ((None, 1e-6), ("bf16", 1e-3)):
        model, reference, _ = fit_both(strategy_of(1, 4, compression), build, compile_model)
        assert difference(model.weights, reference.weights) <= limit and difference_of_columns(model) == 0.0
        assert compression is None or difference(model.weights, reference.weights) > 1e-6


def test_states_of_layers_and_random_numbers() -> None:
    """The schedule changes nothing, each step draws other numbers, and moving statistics are averaged."""

    def build() -> keras.Model:
        dropout = keras.layers.Dropout(0.5)
        i = keras.Input((12,))
        x = keras.layers.BatchNormalization(momentum=0.5)(i)
        x = dropout(keras.layers.Dense(16, "relu")(x))
        return keras.Model(i, keras.layers.Dense(5)(dropout(keras.layers.Dense(16, name="second")(x))))

    def trained(**options: Any) -> keras.Model:
        with strategy_of(2, cuts=["second"], **options).scope():
            model = runs.made(build, lambda m: runs.compile_classifier(m, optimizers.SGD(0.1)))
        model.fit(runs.X[:48], runs.CLASSES[:48], batch_size=16, shuffle=False, verbose=0)
        return model

    first, second = trained(), trained(schedule="gpipe")
    assert difference(first.variables, second.variables) == 0.0
    [seed] = [variable for variable in first.variables if "seed" in variable.path]
    assert seed.numpy()[1] == 3 * 4  # steps times micro-batches, in the stage that owns the layer
    normalization = next(layer for layer in first.layers if isinstance(layer, keras.layers.BatchNormalization))
    mean = np.zeros(12)
    for step in range(3):
        mean = 0.5 * mean + 0.5 * runs.X[step * 16 : step * 16 + 16].mean(0)
    np.testing.assert_allclose(normalization.moving_mean.numpy(), mean, atol=1e-6)
