"""Trainings whose columns compress their gradients."""

import shutil
from typing import Any

import keras
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from pipeline_runs import difference, difference_of_columns

from tfdist.callbacks import FailureRecovery
from tfdist.compression import Policy, Quantize, WarmUp
from tfdist.strategies import MirroredStrategy, ModelParallelStrategy, Pipeline

pytestmark = pytest.mark.usefixtures("cpus")
optimizers = keras.optimizers
rng = np.random.default_rng(4)
X = rng.normal(size=(96, 12)).astype("float32")
CLASSES = np.argmax(X[:, :5] + X[:, 5:10], -1)
METHODS = ["bf16", "fp8", "int8", "int4", "sign", "topk:0.1", "randomk:0.2", "powersgd:2"]
MIXED = Policy({"dense": "int8", "logits": None, ".*": "powersgd:2"}, dense_steps=2, dense_below=64)


def adam() -> Any:
    return optimizers.Adam(1e-2, global_clipnorm=1.0)


def columns_of(stages: int, columns: int, compression: Any) -> ModelParallelStrategy:
    devices = [f"CPU:{index}" for index in range(stages * columns)]
    pipeline = Pipeline(stages=stages, micro_batches=1 if stages == 1 else 2)
    return ModelParallelStrategy(devices, pipeline=pipeline, data_parallel=columns, compression=compression)


def built(strategy: tf.distribute.Strategy, optimizer: Any) -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        names = ["dense", "middle", "logits"]
        sizes = zip((128, 16, 5), ("relu", "tanh", None), names, strict=True)
        model = keras.Sequential(
            [keras.Input((12,)), *(keras.layers.Dense(size, kind, name=name) for size, kind, name in sizes)]
        )
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def fit(model: keras.Model, epochs: int = 2, x: Any = X, callbacks: Any = ()) -> list[float]:
    options = {"batch_size": 32, "shuffle": False, "verbose": 0}
    return model.fit(x, CLASSES, epochs=epochs, callbacks=list(callbacks), **options).history["loss"]


def states_of(model: keras.Model) -> dict[str, np.ndarray]:
    replicas = model.distribute_strategy.compression_state.replicas
    return {
        f"{number}/{path.split('/', 1)[1]}/{name}": variable.numpy()
        for number, replica in replicas.items()
        for path, entries in replica.entries.items()
        for name, variable in entries.items()
    }


@pytest.mark.parametrize(
    ("count", "compression"),
    [(2, MIXED), *(pytest.param(4, method, marks=pytest.mark.long) for method in (MIXED, *METHODS))],
)
def test_columns_of_one_stage_equal_mirrored_replicas(count: int, compression: Any) -> None:
    columns = built(columns_of(1, count, compression), adam)
    devices = [f"CPU:{index}" for index in range(count)]
    mirrored = built(MirroredStrategy(devices, compression=compression), adam)
    losses = fit(columns), fit(mirrored)
    # Gradients are sums in another order; where one is near zero, Adam's first steps amplify the rounding.
    assert difference(columns.weights, mirrored.weights) <= 1e-5
    np.testing.assert_allclose(*losses, atol=1e-5)
    assert difference_of_columns(columns) == 0.0
    found, expected = states_of(columns), states_of(mirrored)
    assert found.keys() == expected.keys()
    assert any(key.endswith("residual") for key in found) == (compression != "bf16")  # its rounding errors are not kept


@pytest.mark.long  # the tests below train in such columns, and that above compares sums with those of replicas
def test_two_stages_in_two_columns_converge_like_uncompressed_ones() -> None:
    compressed, exact = (built(columns_of(2, 2, method), adam) for method in ("int4", None))
    losses, expected = fit(compressed, epochs=15), fit(exact, epochs=15)
    assert difference_of_columns(compressed) == 0.0 and difference(compressed.weights, exact.weights) > 1e-5
    assert expected[-1] < 0.5 * expected[0] and losses[-1] < 1.1 * expected[-1]
    devices = compressed.distribute_strategy.columns
    for column, replica in enumerate(compressed.distribute_strategy.compression_state.replicas.values()):
        places = {path.split("/")[1]: entries["residual"].device for path, entries in replica.entries.items()}
        assert places == {"dense": devices[column][0], "middle": devices[column][1]}
    residuals = [value for key, value in states_of(compressed).items() if key.endswith("dense/kernel/residual")]
    assert not np.array_equal(*residuals)


def test_a_skipped_update_changes_no_state() -> None:
    bad = X.copy()
    bad[40] = np.inf  # in the second column's part of the second batch
    scaled = lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0)  # noqa: E731
    model = built(columns_of(2, 2, MIXED), scaled)
    model.fit(X[:32], CLASSES[:32], batch_size=32, epochs=3, shuffle=False, verbose=0)
    before, weights = states_of(model), model.get_weights()
    assert any(np.abs(value).max() > 0 for key, value in before.items() if key.endswith("residual"))
    model.fit(bad[32:64], CLASSES[32:64], batch_size=32, verbose=0)
    assert float(model.optimizer.dynamic_scale.numpy()) == 4.0
    for found, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, expected)
    after = states_of(model)
    assert all(np.array_equal(after[key], before[key]) for key in before)


def test_a_loss_scale_that_is_a_power_of_two_changes_nothing() -> None:
    """Not even the residuals, with accumulation, clipping and averages."""

    def optimizer() -> Any:
        return optimizers.Adam(
            1e-2, gradient_accumulation_steps=3, clipnorm=0.1, loss_scale_factor=1024.0, use_ema=True, weight_decay=0.01
        )

    model, plain = (built(columns_of(2, 2, "int8"), optimizer) for _ in range(2))
    plain.optimizer.loss_scale_factor = None
    assert fit(model) == fit(plain)
    assert difference(model.weights, plain.weights) == 0.0 and difference_of_columns(model) == 0.0
    assert all(np.array_equal(value, states_of(plain)[key]) for key, value in states_of(model).items())


def test_rows_of_embeddings() -> None:
    def trained(strategy: tf.distribute.Strategy) -> keras.Model:
        with strategy.scope():
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Embedding(50, 32, name="table"), keras.layers.Flatten(), keras.layers.Dense(5)]
            model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
            model.compile(optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        fit(model, x=runs.TOKENS)
        return model

    columns = trained(columns_of(1, 2, "int8"))
    mirrored = trained(MirroredStrategy(["CPU:0", "CPU:1"], compression="int8"))
    assert difference(columns.weights, mirrored.weights) <= 1e-5 and difference_of_columns(columns) == 0.0
    found, expected = states_of(columns), states_of(mirrored)
    assert found.keys() == expected.keys() and len(found) == 2
    for key in found:
        np.testing.assert_allclose(found[key], expected[key], atol=1e-5)


class Interruption(keras.callbacks.Callback):
    """Ends the training after its second epoch, as a failure."""

    is_stateless = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.long
def test_an_interrupted_training_resumes_with_its_states(tmp_path: Any) -> None:
    undisturbed, interrupted = (built(columns_of(2, 2, MIXED), adam) for _ in range(2))
    fit(undisturbed, epochs=3)
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, 3, callbacks=[FailureRecovery(tmp_path / "0", every_steps=1), Interruption()])
    resumed = built(columns_of(2, 2, MIXED), adam)
    fit(resumed, 3, callbacks=[FailureRecovery(tmp_path / "0", every_steps=100)])
    assert difference(resumed.weights, undisturbed.weights) == 0.0
    after, expected = states_of(resumed), states_of(undisturbed)
    assert after.keys() == expected.keys()
    assert all(np.array_equal(value, expected[key]) for key, value in after.items())


class FirstState(keras.callbacks.Callback):
    """Keeps the state with which a training resumes."""

    is_stateless = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.state = getattr(self, "state", None) or states_of(self.model)


@pytest.mark.long
def test_states_are_restored_with_other_stages_and_columns(tmp_path: Any) -> None:
    interrupted = built(columns_of(2, 2, MIXED), adam)
    with pytest.raises(KeyboardInterrupt):
        recovery = FailureRecovery(tmp_path / "0", every_steps=1, background=False)
        fit(interrupted, 3, callbacks=[recovery, Interruption()])
    saved: dict[str, np.ndarray] = {}
    for stages, columns in [(2, 2), (1, 4), (2, 1)]:
        directory = shutil.copytree(tmp_path / "0", tmp_path / f"{stages} {columns}")
        resumed, first = built(columns_of(stages, columns, MIXED), adam), FirstState()
        fit(resumed, 3, callbacks=[FailureRecovery(directory, every_steps=100), first])
        saved = saved or first.state
        for key in saved:
            name = key.partition("/")[2]
            before, now = ([one[k] for k in one if k.partition("/")[2] == name] for one in (saved, first.state))
            assert len(now) == columns
            if name.endswith("residual"):  # their sum over the columns stays
                np.testing.assert_allclose(sum(now), sum(before), atol=1e-7)
                assert np.abs(sum(before)).max() > 1e-4
            else:
                assert all(np.array_equal(one, before[0]) for one in now)


def test_different_numbers_of_uncompressed_steps_are_rejected() -> None:
    method = {"dense": WarmUp(Quantize(8), 2), "middle": WarmUp(Quantize(8), 3)}
    model = built(columns_of(1, 2, method), adam)
    with pytest.raises(ValueError, match="send all variables uncompressed in the same steps"):
        fit(model, 1)
