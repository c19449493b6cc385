"""The strategy's arguments, its table of stages, and weights that are read and assigned from outside."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import ModelParallelStrategy, Pipeline
from tfdist.training.strategy_protocol import is_tfdist_strategy

X, Y = np.random.default_rng(0).normal(size=(2, 40, 12)).astype("float32")


def made(columns: int, cpus: list[str], optimizer: Any = keras.optimizers.Adam) -> keras.Model:
    strategy = ModelParallelStrategy(cpus[: 2 * columns], pipeline=Pipeline(stages=2), data_parallel=columns)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((12,)), *(keras.layers.Dense(units, name=f"dense_{units}") for units in (64, 32, 12))]
        )
        model.compile(optimizer(1e-3), "mse")
    return model


def copies_differ_by(model: keras.Model) -> float:
    held = [variable._value for variable in [*model.variables, *model.optimizer.variables]]
    return max(float(np.abs(one.numpy() - copy.numpy()).max()) for one in held for copy in one.copies)


def test_arguments_are_checked(cpus: list[str]) -> None:
    two = Pipeline(stages=2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"devices": cpus[:2], "pipeline": 2}, "Invalid `pipeline`"),
        ({"devices": cpus[:3], "pipeline": two}, "number of devices differs"),
        ({"devices": ["CPU:0", "/cpu:0"], "pipeline": two}, "Two stages have the same device"),
        ({"devices": cpus[:2], "pipeline": two, "compression": "int9"}, "Unknown compressor name"),
        ({"devices": cpus[:2], "pipeline": two, "data_parallel": 0}, "Invalid `data_parallel`"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=f"{message}.* Received: .*Expected: "):
            ModelParallelStrategy(arguments.pop("devices"), **arguments)
    options_of: list[tuple[dict[str, Any], str]] = [
        ({"schedule": "x"}, "schedule"),
        ({"cuts": ["a", "b"]}, "cuts"),
        ({"cuts": "a"}, "cuts"),
        ({"costs": {"a": -1.0}}, "costs"),
    ]
    for options, message in options_of:
        with pytest.raises(ValueError, match=f"Invalid `{message}` of a pipeline. Received: .*Expected: "):
            Pipeline(stages=2, **options)
    assert is_tfdist_strategy(ModelParallelStrategy(cpus[:2], pipeline=two))


def test_summary_shows_the_stages(cpus: list[str]) -> None:
    model = made(2, cpus)
    lines: list[str] = []
    model.distribute_strategy.summary(model, lines.append)
    assert re.match(r"stage +device +layers +parameters +cost +sends/sample +held", lines[0])
    assert re.match(r"0 +CPU:0 CPU:2 +dense_64 +832 +\d+% +256 B +2", lines[2])
    assert "expected bubble 20%" in lines[4]
    assert lines[6] == "stage 0  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 --"


def test_given_and_measured_costs_are_balanced(cpus: list[str]) -> None:
    model = made(1, cpus)
    strategy = model.distribute_strategy
    before = model.get_weights()
    costs = strategy.measure_costs(model, X[:4])
    assert list(costs) == [layer.name for layer in model.layers] and all(0 < cost < 60 for cost in costs.values())
    for weight, expected in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, expected)

    def table(costs: dict[str, float]) -> list[str]:
        pipeline, lines = Pipeline(stages=2, costs=costs), list[str]()
        ModelParallelStrategy(cpus[:2], pipeline=pipeline).summary(model, lines.append)
        return lines[2:4]

    first, second = table({"dense_64": 1.0, "dense_32": 2.0, "dense_12": 3.0})
    assert "dense_64 ... dense_32 (2)" in first and " 50% " in first and "dense_12" in second
    assert "dense_64  " in table({"dense_64": 2.0, "dense_32": 0.5})[0]
    with pytest.raises(ValueError, match="costs name layers that the model does not have. Received: .*Expected: "):
        table({"other": 1.0})


def test_variables_are_where_their_layers_are(cpus: list[str]) -> None:
    model = made(1, cpus, lambda rate: keras.optimizers.Adam(rate, use_ema=True))
    model.fit(X, Y, verbose=0)
    (first, last), chief = model.distribute_strategy.columns[0], "/job:localhost/replica:0/task:0/device:CPU:0"
    for layer, device in zip(model.layers, (first, last, last), strict=True):
        assert {variable.value.device for variable in layer.weights} == {device}
    slots = {variable.path: variable.value.device for variable in model.optimizer.variables}
    assert {device for path, device in slots.items() if "dense_12" in path} == {last}
    assert {device for path, device in slots.items() if "iteration" in path} == {chief}
    assert {variable.value.device for variable in model.metrics_variables} == {last}


def test_columns_follow_weights_that_are_assigned_from_outside(cpus: list[str], tmp_path: Any) -> None:
    model, reference = made(2, cpus), keras.models.clone_model(made(1, cpus))
    model.fit(X, Y, shuffle=False, verbose=0)
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.save(tmp_path / "ckpt")
    saved = model.get_weights()
    model.set_weights([weight * 0.5 for weight in saved])
    assert copies_differ_by(model) == 0.0
    model.fit(X, Y, shuffle=False, verbose=0)
    assert copies_differ_by(model) == 0.0
    checkpoint.restore(path).expect_partial()
    assert copies_differ_by(model) == 0.0
    for weight, expected in zip(model.get_weights(), saved, strict=True):
        np.testing.assert_array_equal(weight, expected)
    reference.set_weights(saved)
    np.testing.assert_allclose(model.predict(X, verbose=0), reference.predict(X, verbose=0), atol=1e-5)


def test_a_saved_training_resumes_in_stages(cpus: list[str], tmp_path: Any) -> None:
    model = made(2, cpus)
    model.fit(X, Y, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    with model.distribute_strategy.scope():
        resumed = keras.models.load_model(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    losses = [one.train_on_batch(X, Y) for one in (resumed, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    for weight, expected in zip(resumed.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, atol=1e-6)
    assert copies_differ_by(resumed) == 0.0
