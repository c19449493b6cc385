"""What an exchange sends is computed first; gradients of weights are computed while it is sent."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.pipeline.device_program import DeviceProgram
from tfdist.tensor_parallel.shard_group import ShardGroup

pytestmark = pytest.mark.usefixtures("cpus")
rng = np.random.default_rng(0)
X, KERNEL = (rng.normal(size=shape).astype("float32") for shape in ((5, 4), (4, 6)))


def _dense(group: Any, x: Any, kernel: Any) -> Any:
    """A Dense by columns: its gradient is sent, that of its weights is not."""
    result = tf.tanh(tf.matmul(group.enter(tf.sin(x)), kernel))
    return [result], tf.gradients(result, [x, kernel], group.seed(result))


def test_gradients_of_weights_follow_what_is_sent() -> None:
    devices = [one.name for one in tf.config.list_logical_devices("CPU")[:2]]
    specs = [tf.TensorSpec([None, 4]), tf.TensorSpec([4, 3])]
    program = DeviceProgram(_dense, specs, 2, ShardGroup)
    assert [len(parts) for parts in program.calls] == [1, 2, 1]
    first, second = program.calls[1]
    types = [{one.type for one in part.function.graph.get_operations()} for part in (first, second)]
    assert all("MatMul" in of_part for of_part in types) and len(first.outputs) == 2  # what is sent, and what both need

    @tf.function
    def run() -> Any:
        parts = tf.split(KERNEL, 2, 1)
        nothing: list[list[tf.Operation]] = [[], []]
        results, state = program.forward([[tf.constant(X), one] for one in parts], devices, nothing, None)
        gradients = program.backward(state, [[tf.ones([5, 3])] for _ in devices], nothing)
        return results, gradients

    calls = [one for one in run.get_concrete_function().graph.get_operations() if one.type == "PartitionedCall"]
    names = [part.function.name.decode() for part in (first, second)]
    of_backward = [one for one in calls if one.get_attr("f").name in names]
    assert len(of_backward) == 4
    for urgent, rest in zip(of_backward[::2], of_backward[1::2], strict=True):
        assert urgent in {*rest.control_inputs, *(given.op for given in rest.inputs)}
    with tf.GradientTape() as tape:
        x, kernel = tf.constant(X), tf.constant(KERNEL)
        tape.watch([x, kernel])
        expected = tf.tanh(tf.matmul(tf.sin(x), kernel))
    of_x, of_kernel = tape.gradient(expected, [x, kernel])
    results, gradients = run()
    np.testing.assert_allclose(tf.concat([one for (one,) in results], 1), expected, rtol=1e-6)
    np.testing.assert_allclose(tf.concat([one for _, one in gradients], 1), of_kernel, rtol=1e-5)
    for own, _ in gradients:
        np.testing.assert_allclose(own, of_x, rtol=1e-5, atol=1e-6)
