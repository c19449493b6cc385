"""Updates of split variables that need more than their own elements: norms, and compressed sums over columns."""

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
from tfdist.compression import Policy, get
from tfdist.keras_internals.placed_variables import held_variable
from tfdist.strategies import ModelParallelStrategy, Pipeline
from tfdist.tensor_parallel.split_variable import SplitVariable

pytestmark = pytest.mark.usefixtures("cpus")
optimizers = keras.optimizers
# One compressor for both split and whole variables, so that both may share buckets.
COMPRESSED = Policy({"bias": None, "first": "powersgd:2", ".*": "int8"}, dense_steps=1, dense_below=32)


def _largest_difference_of_columns(model: keras.Model) -> float:
    """Of copies, and of the parts that the two columns of a strategy with two devices for each stage hold."""
    found = [0.0]
    for one in [*model.weights, *model.optimizer.variables]:
        held = held_variable(one)
        if isinstance(held, SplitVariable):
            pairs = list(zip(held.shards[:2], held.shards[2:], strict=False))
        else:
            pairs = [(held, copy) for copy in held.copies]
        found += [float(np.abs(a.numpy() - b.numpy()).max()) for a, b in pairs]
    return max(found)


@pytest.mark.parametrize(
    "optimizer",
    [
        # Adafactor, below, clips the norms of gradients, too.
        pytest.param(lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05), marks=pytest.mark.long),
        lambda: optimizers.Lamb(1e-2, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=4),
        pytest.param(
            lambda: optimizers.LossScaleOptimizer(
                optimizers.Adam(1e-2, clipnorm=0.05, gradient_accumulation_steps=2), initial_scale=8.0
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(
            lambda: optimizers.Lamb(1e-2, clipnorm=0.05, gradient_accumulation_steps=2), marks=pytest.mark.long
        ),
    ],
)
def test_norms_of_complete_variables(optimizer: Any) -> None:
    """Norms are sums of squares over the parts, so the weights equal those of one process up to rounding."""
    model, reference, logs = fit_both(
        strategy_of(2, columns=2),
        lambda: models.mlp(bias_constraint="non_neg"),
        lambda m: runs.compile_classifier(m, optimizer()),
        epochs=5,
    )
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    if not isinstance(model.optimizer, optimizers.LossScaleOptimizer):  # which Keras lets count micro-steps
        assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-5
    assert _largest_difference_of_columns(model) == 0.0


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optimizers.Adafactor(1e-2, weight_decay=0.1, clipnorm=0.5),
        lambda: optimizers.Muon(1e-2, weight_decay=0.1, adam_weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3),
        pytest.param(
            lambda: optimizers.LossScaleOptimizer(
                optimizers.Adafactor(1e-2, gradient_accumulation_steps=2), initial_scale=8.0
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(lambda: optimizers.Muon(1e-2, gradient_accumulation_steps=2), marks=pytest.mark.long),
    ],
)
def test_updates_of_complete_variables(optimizer: Any) -> None:
    """Variables that are split by rows and by columns, a table of which rows are looked up, and a bias."""

    def build() -> keras.Model:
        tokens = keras.Input((models.LENGTH,), dtype="int32")
        x = keras.layers.Embedding(models.WORDS, 8, name="embedding")(tokens)
        x = keras.layers.Dense(8, name="down")(keras.layers.Dense(16, "gelu", name="up", bias_constraint="non_neg")(x))
        return keras.Model(tokens, keras.layers.Dense(models.WORDS, name="logits")(x))

    model, reference, logs = fit_both(
        strategy_of(2, columns=2),
        build,
        lambda m: runs.compile_classifier(m, optimizer()),
        models.TOKENS,
        models.NEXT,
        epochs=2,
    )
    assert difference(model.weights, reference.weights) <= 1e-5 and logs <= 1e-5
    if not isinstance(model.optimizer, optimizers.LossScaleOptimizer):  # which Keras lets count micro-steps
        assert difference(model.optimizer.variables, reference.optimizer.variables) <= 1e-5
    assert _largest_difference_of_columns(model) == 0.0


def _wide_mlp() -> keras.Model:
    """Parts of less than a block are not worth compressing."""
    x = keras.Input((12,))
    hidden = keras.layers.Dense(64, "relu", name="first")(x)
    hidden = keras.layers.Dense(32, name="down")(keras.layers.Dense(64, "gelu", name="up")(hidden))
    return keras.Model(x, keras.layers.Dense(5, name="head")(keras.layers.Dense(32, "relu", name="last")(hidden)))


def _fit(compression: Any, epochs: int, directory: Any = None, rows: int = 50, rate: Any = None) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy_of(2, columns=2, compression=compression).scope():
        model = _wide_mlp()
        runs.compile_classifier(model, optimizers.Adam(1e-2) if rate is None else optimizers.SGD(rate))
    callbacks = [] if directory is None else [FailureRecovery(directory)]
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    model.fit(runs.X[:rows], runs.CLASSES[:rows], epochs=epochs, **options)
    return model


def _residuals(model: keras.Model) -> list[dict[str, np.ndarray]]:
    replicas = model.distribute_strategy.compression_state.replicas
    return [
        {path: entries["residual"].numpy() for path, entries in replicas[number].entries.items()}
        for number in sorted(replicas)
    ]


@pytest.mark.long
def test_compression_between_columns(tmp_path: Any) -> None:
    model = _fit(COMPRESSED, epochs=3)
    assert _largest_difference_of_columns(model) == 0.0
    found = _residuals(model)  # those of the first column's two devices, then of the second column's
    assert [" ".join(sorted(one)) for one in found] == [
        "down/kernel first/kernel head/kernel last/kernel up/kernel"
    ] * 4
    assert {one["up/kernel"].shape for one in found} == {(64, 32)}
    assert {one["down/kernel"].shape for one in found} == {(32, 32)}
    assert not np.array_equal(found[0]["up/kernel"], found[1]["up/kernel"])
    for path in ("first/kernel", "last/kernel"):  # whole: equal on the devices of a column, not between columns
        np.testing.assert_array_equal(found[0][path], found[1][path])
        np.testing.assert_array_equal(found[2][path], found[3][path])
        assert not np.array_equal(found[0][path], found[2][path])
    sent, exact = model.distribute_strategy.communication, _fit(None, epochs=3)
    # The first of twelve steps is uncompressed, the others send about a quarter.
    assert sent.wire_bytes < 0.4 * exact.distribute_strategy.communication.wire_bytes

    _fit(COMPRESSED, 1, tmp_path / "a")
    resumed, expected = _fit(COMPRESSED, 3, tmp_path / "a"), _fit(COMPRESSED, 3, tmp_path / "b")
    assert difference(resumed.weights, expected.weights) == 0.0
    for before, after in zip(_residuals(expected), _residuals(resumed), strict=True):
        assert all(np.array_equal(before[path], after[path]) for path in before)


def test_residuals_resume_with_the_same_number_of_devices_in_a_stage(tmp_path: Any) -> None:
    """Whole variables have equal residuals on the devices of a stage: their sum over other devices is another one."""
    policy = Policy({"last": "int8", ".*": None})
    _fit(policy, 1, tmp_path, rows=16, rate=0.1)
    with ModelParallelStrategy(
        ["CPU:0", "CPU:1"], pipeline=Pipeline(stages=1), data_parallel=2, compression=policy
    ).scope():
        model = _wide_mlp()
        runs.compile_classifier(model, optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="devices of a stage, with compression. Received: 2 in the .* Expected: 1,"):
        callbacks = [FailureRecovery(tmp_path)]
        model.fit(runs.X[:16], runs.CLASSES[:16], 16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)


def test_checkpoints_of_tensorflow_refuse_another_number_of_devices_in_a_stage(tmp_path: Any) -> None:
    """As FailureRecovery does. Without residuals any number fits."""

    def state_of(ways: int, columns: int) -> Any:
        devices = [f"CPU:{index}" for index in range(ways * columns)]
        options: dict[str, Any] = {"pipeline": Pipeline(stages=1), "data_parallel": columns, "compression": "int8"}
        layout = models.layout(ways) if ways > 1 else None
        return ModelParallelStrategy(devices, layout_map=layout, **options).compression_state

    def checkpoint_of(state: Any) -> Any:
        return tf.train.Checkpoint(compression=state)

    saved = state_of(2, 2)
    empty = checkpoint_of(saved).save(tmp_path / "empty")
    for number in range(4):
        saved.replica_state(number, "CPU:0").of("last/kernel", get("int8"), (512,))
    path = checkpoint_of(saved).save(tmp_path / "state")
    checkpoint_of(state_of(2, 1)).restore(path)
    for other in (state_of(1, 2), state_of(4, 1)):
        with pytest.raises(ValueError, match="does not fit the devices of a stage. Received: that of 2 .* Expected: "):
            checkpoint_of(other).restore(path)
        with pytest.raises(ValueError, match="does not fit the devices of a stage"):
            other.restore([path])
        checkpoint_of(other).restore(empty)


def test_sums_and_residuals_add_up_to_the_gradients() -> None:
    """After a step of SGD the weights differ from exact ones by the learning rate times the sum of the residuals."""
    rate, policy = 0.1, Policy({"bias": None, "first": "powersgd:2", ".*": "int8"})
    model, exact = (_fit(one, 1, rows=16, rate=rate) for one in (policy, None))
    assert _largest_difference_of_columns(model) == 0.0
    found = _residuals(model)  # those of the first column's two devices, then of the second column's
    for variable, reference in zip(model.weights, exact.weights, strict=True):
        held, difference_of_weights = held_variable(variable), variable.numpy() - reference.numpy()
        if variable.path not in found[0]:
            np.testing.assert_allclose(difference_of_weights, 0.0, atol=1e-6)
            continue
        of_devices = [found[device][variable.path] + found[device + 2][variable.path] for device in range(2)]
        is_split = isinstance(held, SplitVariable)
        residual = np.concatenate(of_devices, held.axis) if is_split else of_devices[0]
        assert np.abs(residual).max() > 1e-4
        np.testing.assert_allclose(difference_of_weights, rate * residual, atol=1e-6)
