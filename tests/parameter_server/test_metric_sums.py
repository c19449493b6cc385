"""Sums the metrics of steps, in the order of the steps' numbers."""

import itertools

import keras
import numpy as np
import pytest

from tfdist.parameter_server.chief import MetricSums

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(scope="module")
def model(cpus):
    built = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    built.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae")])
    built.evaluate(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    return built


def summed(model):
    return [variable for variable in model.metrics_variables if variable.aggregation == "sum"]


@pytest.mark.parametrize("in_order", [True, False])
def test_metrics_of_an_epoch_are_sums(model, in_order):
    model.reset_metrics()
    names = [variable.path for variable in summed(model)]
    sums = MetricSums(model)
    assert sums.results() == {}
    # Steps of 3 samples with the mean error 2, and of 1 sample with 6.
    steps = [
        ([total * count if "total" in name else count for name in names], last)
        for total, count, last in ((2.0, 3.0, 0.5), (6.0, 1.0, 0.25))
    ]
    for number in (0, 1) if in_order else (1, 0):
        metrics, last = steps[number]
        logs = {"values": {"last": last, "loss": 0.0, "mae": 0.0}, "is_result": np.eye(3, dtype=bool)[[2, 0, 1]]}
        logs["is_result"] = logs["is_result"][:, :2]  # the model has two metrics
        sums.add_in_order(number, [np.float32(value) for value in metrics], logs)
    results = {name: float(value) for name, value in sums.results().items()}
    assert results == {"loss": 3.0, "mae": 3.0, "last": 0.25}
    sums.store()
    assert [float(variable.numpy()) for variable in summed(model)] == [
        12.0 if "total" in name else 4.0 for name in names
    ]
    sums.reset()
    assert sums.results() == {}


def test_rounding_does_not_depend_on_which_step_ended_first(model):
    total, count, *others = model.metrics_variables
    zeros = [np.float32(0)] * len(others)
    sums, parts = MetricSums(model), [1e8, 1.0, -1e8]
    logs = {"values": {"loss": 0.0}, "is_result": np.array([[True, False]])}
    for order in itertools.permutations(range(3)):
        for variable in model.metrics_variables:
            variable.assign(0.0)
        assert [sums.next_number() for _ in parts] == [0, 1, 2]
        for done, number in enumerate(order, 1):
            sums.add_in_order(number, [np.float32(parts[number]), np.float32(1), *zeros], logs)
            assert bool(sums.results()) == (0 in order[:done])
        sums.store()
        assert (float(total), float(count)) == (0.0, 3.0), "1e8 + 1 is 1e8 in float32"
        sums.reset()
