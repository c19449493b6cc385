"""Sums of metrics do not tell which worker was first."""

import itertools

import keras
import numpy as np
import pytest

from tfdist.parameter_server.metric_sums import MetricSums

pytestmark = pytest.mark.usefixtures("cpus")


def test_steps_count_in_the_order_of_their_numbers():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.evaluate(np.ones([1, 1]), np.ones([1, 1]), verbose=0)
    total, count = model.metrics_variables
    sums, parts = MetricSums(model), [1e8, 1.0, -1e8]
    for order in itertools.permutations(range(3)):
        total.assign(0.0)
        count.assign(0.0)
        assert [sums.next_number() for _ in parts] == [0, 1, 2]
        for done, number in enumerate(order, 1):
            sums.add_in_order(number, [np.float32(parts[number]), np.float32(1)], {"loss": 0.0})
            assert bool(sums.results()) == (0 in order[:done])
        sums.store()
        assert (float(total), float(count)) == (0.0, 3.0), "1e8 + 1 is 1e8 in float32"
        sums.reset()
