"""The exchange of one of N equal members: its sums, and the collectives that it records."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.planning.measurements import DENSE, EXCHANGE
from tfdist.probe.exchange_costs import LoopbackExchange, bucket_ready, gradient_error, measure_exchange
from tfdist.probe.probe_strategy import ProbeStrategy
from tfdist.probe.worker_steps import UpdateGradients

METHODS = [DENSE, "bf16", "fp16", "int8", "int4", "sign", "topk:0.01", "powersgd:4"]
RANDOM = np.random.default_rng(0)
DENSE_PARTS = [RANDOM.normal(size=shape).astype("float32") for shape in ((64, 48), (48,), (700, 500))]
ROWS = RANDOM.normal(size=(3, 8)).astype("float32")


@pytest.fixture(scope="module")
def strategy(cpus):
    return ProbeStrategy()


def updates():
    rows = tf.IndexedSlices(tf.constant(ROWS), tf.constant([4, 1, 4]), tf.constant([2000, 8]))
    gradients = (*map(tf.constant, DENSE_PARTS), rows)
    return [UpdateGradients(("a/kernel", "a/bias", "b/kernel", "c/embeddings"), gradients)]


@pytest.mark.parametrize("method", METHODS)
def test_sums_are_those_of_two_equal_members(strategy, method):
    exchange = LoopbackExchange(strategy, method, 2, adds_up=True)
    kernel, bias, large, rows = exchange(updates())
    # Values that are not worth encoding are exact: a bias has 48.
    np.testing.assert_array_equal(bias, 2 * DENSE_PARTS[1])
    assert sorted(rows.indices.numpy()) == [1, 4]
    sums = tf.convert_to_tensor(rows).numpy()[[4, 1]]
    if method == DENSE:
        np.testing.assert_allclose(sums, 2 * np.stack([ROWS[0] + ROWS[2], ROWS[1]]), rtol=1e-6)
        np.testing.assert_array_equal(large, 2 * DENSE_PARTS[2])
        return
    # What is not in the sums is in the residuals of the members, if the method keeps them: nothing is lost.
    entries = exchange.state.replicas["replica_0"].entries
    for path, summed, gradient in (("a/kernel", kernel, DENSE_PARTS[0]), ("b/kernel", large, DENSE_PARTS[2])):
        if "residual" in entries.get(path, {}):
            rest = 2 * entries[path]["residual"].numpy()
            # float32 sums of values up to about 10
            np.testing.assert_allclose(summed.numpy() + rest, 2 * gradient, rtol=0, atol=1e-5)
        else:
            np.testing.assert_allclose(summed, 2 * gradient, rtol=2**-7)  # bfloat16 has 8 bits


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("method", [DENSE, "int8", "powersgd:4"])
def test_recorded_bytes_are_those_that_a_strategy_counts(strategy, method, members):
    given = updates()
    exchange = LoopbackExchange(strategy, method, members)
    tf.function(lambda: [tf.convert_to_tensor(one) for one in exchange(given)], autograph=False)()
    counted = exchange.counters.count()
    found = measure_exchange(strategy, given, method, members, error=0.5)
    assert sum(call.nbytes for call in found.collectives) == counted.gradient_bytes
    assert len(found.collectives) == counted.gradient_collectives
    buckets = [call.bucket for call in found.collectives]
    assert buckets == sorted(buckets) and set(buckets) == set(range(max(buckets) + 1))
    assert any(call.kind == EXCHANGE for call in found.collectives) == (method == "int8" and members == 4)
    assert (found.compute_seconds > 0, found.gradient_error) == (True, 0.5)
    assert (found.state_bytes > 0) == (method != DENSE)


def test_errors_are_relative_to_the_gradient(strategy):
    errors = {method: gradient_error(strategy, updates(), method) for method in ("fp16", "int8", "int4", "topk:0.01")}
    assert 0 < errors["fp16"] < errors["int8"] < errors["int4"] < errors["topk:0.01"] < 1


def test_parts_of_backpropagation():
    steps = [(10.0, [11.5, 12.0]), (20.0, [21.5, 22.0]), (30.0, [39.0, 40.0])]
    assert bucket_ready(steps, 1.0) == (0.5, 1.0)
    assert bucket_ready([(0.0, [0.1, 2.0])], 1.0) == (0.01, 1.0)
