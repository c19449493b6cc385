"""Losses and metrics of outputs that are split over devices: exact, and with small exchanges."""

from typing import Any

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from layout_models import strategy_of
from pipeline_runs import difference, fit_both

from tfdist.keras_internals.compiled_loss import crossentropy_options
from tfdist.keras_internals.keras_symbols import LossFunctionWrapper, get_mask
from tfdist.pipeline.column_run import CopyRun
from tfdist.pipeline.device_program import DeviceProgram
from tfdist.tensor_parallel.shard_group import ShardGroup
from tfdist.tensor_parallel.split_outputs import SplitCrossentropy, split_softmax

layers = keras.layers
pytestmark = pytest.mark.usefixtures("cpus")
rng = np.random.default_rng(0)
ROWS, WORDS = 5, 11  # so that the last part is padded
LOGITS = (4 * rng.normal(size=(ROWS, 3, WORDS))).astype("float32")
IDS = rng.integers(0, WORDS, (ROWS, 3))
SHARES = rng.random((ROWS, 3, WORDS)).astype("float32")  # which do not add up to 1


def _on_devices(function: Any, ways: int, *arguments: Any) -> list[tuple[list[Any], Any]]:
    """Calls a function of a group and parts of logits on devices; returns its results and gradients of the logits.

    The logits are padded by values that are larger than they are.
    """
    padding = -WORDS % ways
    names = [one.name for one in tf.config.list_logical_devices("CPU")[:ways]]
    specs = [tf.TensorSpec([None, *one.shape[1:-1], one.shape[-1]], one.dtype) for one in arguments]
    specs[0] = tf.TensorSpec([None, *arguments[0].shape[1:-1], (WORDS + padding) // ways], arguments[0].dtype)

    def computed(group: Any, *given: Any) -> Any:
        target, *others = function(group, *given)
        return [target, *others], tf.gradients(target, [given[0]], group.seed(target))

    @tf.function
    def run(seed: Any) -> Any:
        program = DeviceProgram(computed, specs, ways, ShardGroup)
        parts = tf.split(tf.pad(arguments[0], [[0, 0], [0, 0], [0, padding]], constant_values=99), ways, -1)
        results, state = program.forward(
            [[part, *arguments[1:]] for part in parts], names, [[] for _ in names], tf.constant(ROWS)
        )
        return results, program.backward(state, [[seed] for _ in names], [[] for _ in names])

    results, gradients = run(tf.cast(tf.reshape(tf.range(1, ROWS * 3 + 1), [ROWS, 3]), arguments[0].dtype))
    return list(zip(results, [of_device[0] for of_device in gradients], strict=True))


@pytest.mark.parametrize("ways", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), IDS),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3), IDS[..., None]),
        (keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2), SHARES),
        (keras.losses.SparseCategoricalCrossentropy(), IDS),  # of a softmax: from its logits
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=3), IDS),  # of a softmax: from probabilities
        (keras.losses.CategoricalCrossentropy(), SHARES),
        pytest.param(LossFunctionWrapper(keras.losses.categorical_crossentropy), SHARES, marks=pytest.mark.long),
    ],
)
def test_values_and_gradients_are_those_of_keras(loss: Any, targets: Any, ways: int) -> None:
    """Up to rounding: the sums of exponentials have another order. Probabilities also without their logits."""
    options = crossentropy_options(loss)
    assert options is not None
    logits, y_true = tf.constant(LOGITS), tf.cast(targets, tf.float32)
    for is_softmax in [False] if options["from_logits"] else [True, False]:

        def of_parts(group: Any, x: Any, y: Any, is_softmax: bool = is_softmax) -> Any:
            y_pred = x if options["from_logits"] else split_softmax(x, group, WORDS)
            split = SplitCrossentropy(group, size=WORDS, **options, with_choices=True)
            value = split(y, y_pred if options["from_logits"] or is_softmax else tf.identity(y_pred))
            return value, split.choices, tf.zeros([]) if get_mask(value) is None else get_mask(value)

        with tf.GradientTape() as tape:
            tape.watch(logits)
            y_pred = logits if options["from_logits"] else keras.activations.softmax(logits)
            value = loss.call(y_true, y_pred if options["from_logits"] or is_softmax else tf.identity(y_pred))
        gradient = tape.gradient(value, logits, tf.reshape(tf.range(1.0, ROWS * 3 + 1), [ROWS, 3]))
        found = _on_devices(of_parts, ways, logits, y_true)
        own, of_padding = np.split(np.concatenate([one for _, one in found], -1), [WORDS], -1)
        np.testing.assert_allclose(own, gradient, rtol=1e-4, atol=1e-5)
        assert not np.any(of_padding)
        for (values, choices, mask), _ in found:
            np.testing.assert_allclose(values, value, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(choices, np.argmax(LOGITS, -1))
            if get_mask(value) is not None:
                np.testing.assert_array_equal(mask, get_mask(value))


def test_ties_unknown_targets_and_half_precision() -> None:
    crossentropy = {"is_sparse": True, "from_logits": True, "ignore_class": None, "label_smoothing": 0.0}

    def of_parts(group: Any, x: Any, y: Any) -> Any:
        split = SplitCrossentropy(group, size=WORDS, **crossentropy, with_choices=True)
        return split(y, x), split.choices

    equal = tf.zeros([ROWS, 3, WORDS], tf.float16)
    for (value, choices), gradient in _on_devices(of_parts, 2, equal, tf.constant(IDS)):
        assert value.dtype == gradient.dtype == tf.float16 and np.abs(value - np.log(WORDS)).max() < 1e-2
        assert not np.any(choices)  # as argmax, the first of equal ones
    # TensorFlow reports the unknown target, or an operation of the other device that waited for it.
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)):
        _on_devices(of_parts, 2, tf.constant(LOGITS), tf.constant(IDS + WORDS))


def test_loss_and_accuracy_from_parts_with_softmax() -> None:
    """Two outputs that share a loss, masks, weights; predictions and further metrics gather outputs on one device."""
    words = rng.integers(0, models.WORDS, (models.SAMPLES, models.LENGTH))
    shares = rng.random((models.SAMPLES, 4)).astype("float32")
    targets = {"logits": words, "up": shares / shares.sum(-1, keepdims=True)}
    weights = {"logits": rng.random((models.SAMPLES, 1)), "up": rng.random(models.SAMPLES)}

    def build() -> keras.Model:
        tokens = keras.Input((models.LENGTH,), dtype="int32")
        x = layers.Embedding(models.WORDS, 8, mask_zero=True, name="embedding")(tokens)
        scores = layers.Dense(models.WORDS, "softmax", name="logits")(x)
        pooled = layers.Dense(4, name="up")(layers.GlobalAveragePooling1D()(x))
        return keras.Model(tokens, {"logits": scores, "up": layers.Activation("softmax", name="shares")(pooled)})

    def compile_model(model: keras.Model) -> None:
        model.compile(
            keras.optimizers.Adam(1e-2),
            {"logits": "sparse_categorical_crossentropy", "up": "categorical_crossentropy"},
            metrics={"logits": ["accuracy"], "up": ["accuracy", "mse"]},
            weighted_metrics={"logits": ["accuracy"]},
        )

    strategy = strategy_of(2, columns=2)
    data = (models.TOKENS, targets, weights)
    batches = tf.data.Dataset.from_tensor_slices(data).batch(16)
    model, reference, logs = fit_both(
        strategy, build, compile_model, batches, None, batch_size=None, epochs=3, traced=True
    )
    assert reference.optimizer.iterations.numpy() == 9
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    predicted, expected = model.predict(models.TOKENS, verbose=0), reference.predict(models.TOKENS, verbose=0)
    for name, values in expected.items():
        np.testing.assert_allclose(predicted[name], values, atol=1e-5)
    lines: list[str] = []
    strategy.summary(model, lines.append)
    assert lines[-2] == "output logits stays split: loss and accuracy are computed from the parts"
    assert (
        lines[-1]
        == "output shares stays split: the loss is computed from the parts; gathered on one device for metrics"
    )


def test_other_losses_gather_outputs() -> None:
    def build() -> keras.Model:
        x = keras.Input((12,))
        return keras.Model(x, layers.Dense(6, name="up")(x))

    values = rng.normal(size=(50, 6)).astype("float32")
    strategy = strategy_of(2)
    model, reference, logs = fit_both(
        strategy, build, lambda m: m.compile(keras.optimizers.SGD(0.1), "mse"), runs.X, values
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    lines: list[str] = []
    strategy.summary(model, lines.append)
    assert lines[-1] == "output up is gathered on all devices of the last stage for mse"


def test_the_next_task_does_not_wait_for_the_outputs_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device holds all outputs for a metric, which arrive later than its own part."""
    forward, waited_for = CopyRun._forward, []

    def noted(run: CopyRun, task: Any) -> None:
        forward(run, task)
        waited_for.extend([[op.type for op in column.last[task.stage]] for column in run.columns])

    monkeypatch.setattr(CopyRun, "_forward", noted)
    strategy = strategy_of(2)
    with strategy.scope():
        model = models.transformer(0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, metrics=[keras.metrics.SparseTopKCategoricalAccuracy(3)], jit_compile=False)
    model.fit(models.TOKENS, models.NEXT, batch_size=20, verbose=0)
    assert waited_for and all(types == ["PartitionedCall"] for types in waited_for)
