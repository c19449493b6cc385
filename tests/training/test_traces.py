"""What the first step costs: how often the user's step is traced, and how many operations an update has."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")

INPUTS = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


class TwoOptimizers(keras.Model):
    """Builds its optimizers in its first step, as GANs do."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]) for _ in range(2)]
        self.graphs = []

    def compile(self, optimizers):
        super().compile(jit_compile=False)
        self.optimizers = optimizers

    def train_step(self, data):
        self.graphs.append(tf.compat.v1.get_default_graph())
        losses = {}
        for index, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            with tf.GradientTape() as tape:
                losses[str(index)] = tf.reduce_mean(part(data) ** 2)
            gradients = tape.gradient(losses[str(index)], part.trainable_weights)
            optimizer.apply_gradients(zip(gradients, part.trainable_weights, strict=True))
        return losses


@pytest.mark.parametrize("loss_scale", [False, True])
def test_a_step_that_builds_its_optimizers_is_traced_once(cpus, loss_scale):
    with MirroredStrategy(cpus[:2]).scope():
        model = TwoOptimizers()
        optimizers = [keras.optimizers.Adam() for _ in range(2)]
        model.compile([keras.optimizers.LossScaleOptimizer(one) for one in optimizers] if loss_scale else optimizers)
    model.fit(tf.data.Dataset.from_tensors(INPUTS), verbose=0)
    assert len(model.graphs) == 2  # replicas
    assert len(set(map(id, model.graphs))) == 1
    assert [int(one.iterations.numpy()) for one in optimizers] == [1, 1]


def test_a_loop_may_update_plain_variables_by_an_optimizer_that_is_not_built(cpus):
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        weight, optimizer = tf.Variable([2.0]), keras.optimizers.SGD(0.5)

    @tf.function
    def step():
        def on_replica():
            with tf.GradientTape() as tape:
                loss = weight[0] ** 2 / 2
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        strategy.run(on_replica)

    step()
    # This loop does not divide its loss by the number of replicas: the gradient is the sum of 2 on each of two.
    assert strategy.experimental_local_results(weight)[0].numpy() == 2.0 - 0.5 * 2 * 2.0


class Observed(keras.optimizers.Adam):
    """Keeps the graph in which it updates."""

    def apply(self, grads, trainable_variables=None):
        self.graph = tf.compat.v1.get_default_graph()
        super().apply(grads, trainable_variables)


def test_what_an_update_computes_for_all_variables_is_computed_once(cpus):
    counts = []
    for layers in (1, 4):
        with MirroredStrategy(cpus[:2]).scope():
            dense = [keras.layers.Dense(4) for _ in range(layers)]
            model = keras.Sequential([keras.Input((4,)), *dense])
            model.compile(Observed(), "mse", jit_compile=False)
        model.fit(INPUTS, INPUTS, batch_size=8, verbose=0)
        definition = model.optimizer.graph.as_graph_def()
        nodes = [*definition.node, *(node for one in definition.library.function for node in one.node_def)]
        counts.append(Counter(node.op for node in nodes))
    # Powers of the step for two betas, in the function that both replicas call.
    assert [found["Pow"] for found in counts] == [2, 2]
    reads = counts[1]["ReadVariableOp"] - counts[0]["ReadVariableOp"]
    # 6 more variables on 2 replicas: forward or backward pass, two momenta, of which one is read twice, the variable.
    assert reads / 12 <= 5
