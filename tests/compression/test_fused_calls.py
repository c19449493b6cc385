"""Encodings and sums that XLA computes equal those that TensorFlow computes."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from methods import METHODS
from replica_threads import on_replicas

from tfdist.compression import ErrorFeedback, fused_calls
from tfdist.compression.block_compressor import BlockCompressor
from tfdist.tensorflow_internals import xla_functions

pytestmark = pytest.mark.usefixtures("cpus")
SHAPES = [(33, 65), (40, 40)]


def reduce_twice(compressor, size):
    """Returns the sums, states and finite flags of two steps on each replica."""

    def run(group, rank):
        states = [compressor.initial_state(shape) for shape in SHAPES]
        results = []
        for number in range(2):
            random = np.random.default_rng((rank, number))
            gradients = [tf.constant(random.normal(size=shape) * (rank + 1), tf.float32) for shape in SHAPES]
            reduced = compressor.reduce(gradients, group, states)
            states = reduced.states
            results.append(tf.nest.map_structure(lambda tensor: tensor.numpy(), (reduced.sums, states, reduced.finite)))
        return results

    return on_replicas(size, run)[0]


def assert_close(found, expected):
    """XLA may multiply and add in one operation, without rounding in between: some ulp of values up to 8."""
    differ = ~np.isclose(found, expected, rtol=0, atol=5e-6)
    assert np.count_nonzero(differ) <= 2  # values on a tie between two codes


@pytest.mark.parametrize(
    ("name", "size", "calls"),
    [
        ("bf16", 2, 4),  # the encodings of two shapes, the sum, whether it is finite; residuals are those of feedback
        ("fp16", 2, 6),
        ("fp8", 2, 6),
        ("int8", 3, 8),  # two phases also encode the sum, with its error, and decode it
        ("int4", 2, 6),
        ("sign", 2, 6),
        ("topk 0.1 of 64", 2, 2),
        ("powersgd 2", 2, 2),
    ],
)
def test_large_tensors_are_computed_by_xla_with_equal_results(name, size, calls, monkeypatch):
    compressor = METHODS[name] if name == "bf16" else ErrorFeedback(METHODS[name])
    by_tensorflow = reduce_twice(compressor, size)
    monkeypatch.setattr(fused_calls, "FUSED_VALUES", 1)
    fused_calls._compiled.cache_clear()
    by_xla = reduce_twice(compressor, size)
    compiled = fused_calls._compiled.cache_info().misses
    assert compiled >= calls
    for found, expected in zip(itertools.chain(*by_xla), itertools.chain(*by_tensorflow), strict=True):
        for state in (*found[1], *expected[1]):
            state.pop("factor", None)  # the signs of its columns are arbitrary
        tf.nest.map_structure(assert_close, found, expected)
    for others in by_xla[1:]:  # bit-identical on all replicas
        for step, other in zip(by_xla[0], others, strict=True):
            tf.nest.map_structure(np.testing.assert_array_equal, step[0], other[0])


def test_equal_functions_and_shapes_are_compiled_once(monkeypatch):
    monkeypatch.setattr(fused_calls, "FUSED_VALUES", 1)
    fused_calls._compiled.cache_clear()
    method = METHODS["int8"]
    assert isinstance(method, BlockCompressor)
    for same in (method, type(method)(8)):
        fused_calls.fused(same.encode_blocks, tf.ones([2, 256]))
    fused_calls.fused(method.encode_blocks, tf.ones([3, 256]))
    assert fused_calls._compiled.cache_info().misses == 2


def test_without_xla_and_for_unknown_shapes_tensorflow_computes(monkeypatch):
    monkeypatch.setattr(fused_calls, "FUSED_VALUES", 1)
    fused_calls._compiled.cache_clear()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None])])
    def of_any_length(values):
        return fused_calls.fused(tf.abs, values)

    assert of_any_length(tf.constant([-2.0])).numpy() == [2.0]
    monkeypatch.setattr(xla_functions.tf.config, "list_logical_devices", lambda: [tf.config.LogicalDevice("g", "GPU")])
    xla_functions._has_cpus_only.cache_clear()
    try:
        assert fused_calls.fused(tf.abs, tf.constant([-3.0])).numpy() == [3.0]
    finally:
        xla_functions._has_cpus_only.cache_clear()
    assert fused_calls._compiled.cache_info().misses == 0
