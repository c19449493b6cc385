"""What a step on a worker reads and assigns, here of variables of this process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_internals.strategy_patches import patch_keras
from tfdist.parameter_server.worker_scope import WorkerScope
from tfdist.strategies import ParameterServerStrategy
from tfdist.strategies.parameter_server_strategy import HOOKS

pytestmark = pytest.mark.usefixtures("cpus")


class Total(keras.layers.Layer):
    """Assigns a variable that Keras casts to the dtype of the computation."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), initializer="ones")
        self.total = self.add_weight(shape=(), trainable=False)

    def call(self, inputs):
        self.total.assign(1.0 + 2.0**-20)
        return inputs @ self.kernel


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(("pull_dtype", "bytes_of_a_weight"), [(None, 4), (tf.bfloat16, 2)])
def test_variables_cross_the_network_and_are_updated_in_their_dtype(policy, pull_dtype, bytes_of_a_weight):
    patch_keras(ParameterServerStrategy, HOOKS)
    layer = Total(dtype=policy)
    layer.build((None, 3))
    scopes = []

    @tf.function(autograph=False)
    def step(inputs):
        scope = WorkerScope([], tf.constant(0, tf.int64), pull_dtype)
        scopes.append(scope)
        with scope.step():
            layer(inputs)
        return tf.convert_to_tensor(scope.get_current_value(layer.total))

    assert step(np.ones([2, 3], "float32")).numpy() == np.float32(1.0 + 2.0**-20)
    assert scopes[0].bytes_pulled == bytes_of_a_weight * 6
