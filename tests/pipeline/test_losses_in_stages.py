"""Losses of the user's code: scalars with weights and masks, `compute_loss` with variables, unusual activations."""

from typing import Any

import keras
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from pipeline_runs import difference, difference_of_columns, fit_both, layers, ops, strategy_of

pytestmark = pytest.mark.usefixtures("cpus")


class Scalar(keras.losses.Loss):
    """Returns one number, which Keras multiplies with the weights of all samples."""

    def call(self, y: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y - y_pred))


def _sum(y: Any, y_pred: Any) -> Any:
    return 0.01 * ops.sum(ops.square(y - y_pred))


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        pytest.param(Scalar(), runs.WEIGHTS, marks=pytest.mark.long),  # the next test has it with masks
        (Scalar(reduction="mean_with_sample_weight"), runs.WEIGHTS),
        (Scalar(reduction="sum"), runs.WEIGHTS * 0.1),
        pytest.param(Scalar(reduction="sum"), None, marks=pytest.mark.long),
        (_sum, runs.WEIGHTS),
    ],
    ids=["mean", "weighted mean", "sum", "sum without weights", "sum function"],
)
def test_scalar_losses_with_weights(loss: Any, weights: Any) -> None:
    model, reference, logs = fit_both(
        strategy_of(2, micro_batches=3),
        lambda: runs.mlp(3),
        lambda m: m.compile(keras.optimizers.SGD(0.1), loss),
        y=runs.VALUES,
        sample_weight=weights,
        epochs=2,
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


def test_scalar_losses_with_masks() -> None:
    def build() -> keras.Model:
        tokens = keras.Input((runs.LENGTH,), dtype="int32")
        x = layers.LSTM(8, return_sequences=True)(layers.Embedding(runs.WORDS, 8, mask_zero=True)(tokens))
        return keras.Model(tokens, layers.Dense(1)(x))

    targets = runs.INPUTS["features"][:, :1].repeat(runs.LENGTH, 1)[..., None]
    model, reference, logs = fit_both(
        strategy_of(2), build, lambda m: m.compile(keras.optimizers.SGD(0.1), Scalar()), runs.TOKENS, targets
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


@pytest.mark.parametrize(
    "reduction", [pytest.param("sum_over_batch_size", marks=pytest.mark.long), "mean_with_sample_weight"]
)
def test_ignored_classes_do_not_count(reduction: str) -> None:
    """The mask of the loss has the shape of the outputs."""

    def build() -> keras.Model:
        tokens = keras.Input((runs.LENGTH,), dtype="int32")
        x = layers.GRU(8, return_sequences=True)(layers.Embedding(runs.WORDS, 8, mask_zero=True)(tokens))
        return keras.Model(tokens, layers.Dense(runs.WORDS)(x))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3, reduction=reduction)
    model, reference, logs = fit_both(
        strategy_of(2),
        build,
        lambda m: m.compile(keras.optimizers.SGD(0.1), loss),
        runs.TOKENS,
        runs.TARGETS["words"] % 5,
        sample_weight=runs.WEIGHTS.repeat(2)[: runs.SAMPLES, None].repeat(runs.LENGTH, 1),
        batch_size=40,
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


class Documented(keras.Model):
    """The example of the documentation of `keras.Model.compute_loss`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = ops.mean(ops.square(y_pred - y)) + ops.sum(self.losses)
        self.loss_tracker.update_state(loss)
        return loss

    def reset_metrics(self) -> None:
        self.loss_tracker.reset_state()

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]


class LearnedWeights(keras.Model):
    """Trains the weights of two losses (Kendall et al. 2018), and measures one of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scales = self.add_weight(shape=(2,), initializer="zeros", name="scales")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        self.error.update_state(y, y_pred)
        absolute = ops.mean(ops.abs(y - y_pred))
        stock = super().compute_loss(x, y, y_pred, sample_weight)
        return ops.exp(-self.scales[0]) * stock + ops.exp(-self.scales[1]) * absolute + ops.sum(self.scales)


@pytest.mark.parametrize("columns", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("kind", [pytest.param(Documented, marks=pytest.mark.long), LearnedWeights])
def test_own_losses_update_metrics_and_train_variables(kind: type, columns: int) -> None:
    def build() -> keras.Model:
        inputs = keras.Input((12,))
        return kind(inputs, layers.Dense(3)(layers.Dense(8, "relu")(inputs)))

    model, reference, logs = fit_both(
        strategy_of(2, columns),
        build,
        lambda m: m.compile(keras.optimizers.Adam(0.05), "mse"),
        y=runs.VALUES,
        validation_data=(runs.X, runs.VALUES),
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5


class Fourier(layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.signal.fft(tf.cast(x, tf.complex64))

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, "complex64")


class Magnitude(layers.Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)

    def call(self, x: Any) -> Any:
        return tf.abs(x)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, "float32")


def test_complex_tensors_between_stages_have_gradients() -> None:
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((12,)), layers.Dense(12), Fourier(), Magnitude(name="cut"), layers.Dense(3)]
    )
    model, reference, _ = fit_both(
        strategy_of(2, cuts=["cut"]), build, lambda m: m.compile(keras.optimizers.SGD(0.01), "mse"), y=runs.VALUES
    )
    assert difference(model.weights, reference.weights) <= 1e-6


def test_outputs_may_have_several_rows_for_each_sample() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((4, 3))
        return keras.Model(inputs, layers.Dense(2)(ops.reshape(layers.Dense(5)(inputs), (-1, 5))))

    x = runs.X.reshape(50, 4, 3)
    with strategy_of(2).scope():
        model = runs.made(build, lambda _: None)
    expected = runs.made(build, lambda _: None).predict(x, verbose=0)
    for size in (16, 3):
        np.testing.assert_allclose(model.predict(x, batch_size=size, verbose=0), expected, atol=1e-5)


def _frozen(model: keras.Model) -> None:
    model.trainable = False
    model.compile(keras.optimizers.SGD(0.1, global_clipnorm=1.0), "mse")


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_without_trainable_weights_is_only_evaluated() -> None:
    model, reference, logs = fit_both(strategy_of(2), lambda: runs.mlp(3), _frozen, y=runs.VALUES)
    assert logs <= 1e-5 and int(model.optimizer.iterations) == int(reference.optimizer.iterations) == 0


def test_an_optimizer_of_other_variables_is_rejected_as_in_keras() -> None:
    with strategy_of(2).scope():
        model = runs.mlp(3)
        model.layers[0].trainable = False
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(runs.X, runs.VALUES, verbose=0)
        model.layers[0].trainable = True
        model.compile(model.optimizer, "mse")
        with pytest.raises(ValueError, match="Unknown variable"):
            model.fit(runs.X, runs.VALUES, verbose=0)


def test_an_operation_that_fails_changes_no_weights_and_is_explained() -> None:
    ids = np.random.default_rng(0).integers(0, 9, (48, 6))
    bad = ids.copy()
    bad[20] = 9  # the second batch
    with strategy_of(2, 2).scope():
        model = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(9, 4), layers.Flatten()])
        model.add(layers.Dense(3))
        model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(ids[:16], runs.VALUES[:16], batch_size=16, verbose=0)
    before = model.get_weights()
    with pytest.raises(tf.errors.OpError, match="An operation of a stage has failed|indices.* is not in"):
        model.fit(bad[16:], runs.VALUES[16:48], batch_size=16, shuffle=False, verbose=0)
    for now, earlier in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, earlier)
    counted = int(model.optimizer.iterations)
    assert counted in (1, 2) and difference_of_columns(model) == 0.0  # the failed step may count, as in one process
    model.fit(ids, runs.VALUES[:48], batch_size=16, verbose=0)
    assert int(model.optimizer.iterations) == counted + 3 and difference_of_columns(model) == 0.0


class ByColumns(keras.regularizers.Regularizer):
    """Returns a number for each output, which Keras adds."""

    def __call__(self, x: Any) -> Any:
        return 0.1 * ops.sum(ops.square(x), axis=0)


def test_regularizers_may_return_several_numbers() -> None:
    build = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((12,)), layers.Dense(8, kernel_regularizer=ByColumns()), layers.Dense(3)]
    )
    model, reference, logs = fit_both(
        strategy_of(2), build, lambda m: m.compile(keras.optimizers.SGD(0.1), "mse"), y=runs.VALUES
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
