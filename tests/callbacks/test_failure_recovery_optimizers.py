"""FailureRecovery restores optimizers that the first step builds, as those of generative adversarial networks are."""

import keras
import pytest
import tensorflow as tf
from interruptions import Interrupt, Interrupted
from small_training import INPUTS, assert_same

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


class Gan(keras.Model):
    """Two networks, trained by optimizers that are built when each is first applied."""

    def __init__(self, with_call):
        super().__init__()
        self.generator, self.discriminator = (
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)]) for units in (3, 1)
        )
        if not with_call:
            self.__class__ = GanWithoutCall

    def compile(self, generator_optimizer, discriminator_optimizer):
        super().compile(loss="mse", jit_compile=False)
        self.optimizers = {"generator": generator_optimizer, "discriminator": discriminator_optimizer}

    def call(self, inputs):
        return self.discriminator(self.generator(inputs))

    def train_step(self, data):
        logs = {}
        for name, sign in (("discriminator", 1.0), ("generator", -1.0)):
            network = getattr(self, name)
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(self.discriminator(self.generator(data)) - self.discriminator(data) ** 2)
            gradients = tape.gradient(loss, network.trainable_variables)
            self.optimizers[name].apply_gradients(zip(gradients, network.trainable_variables, strict=True))
            logs[name] = loss
        return logs


class GanWithoutCall(Gan):
    call = keras.Model.call


def trained(directory, *callbacks, replicas, with_call, wrapped=False):
    keras.utils.set_random_seed(0)
    with MirroredStrategy([f"CPU:{index}" for index in range(replicas)]).scope():
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model = Gan(with_call)
        model.compile(keras.optimizers.LossScaleOptimizer(adam) if wrapped else adam, keras.optimizers.SGD(0.1, 0.9))
    callbacks = [FailureRecovery(directory, every_steps=2), *callbacks]
    data = tf.data.Dataset.from_tensor_slices(INPUTS).batch(4)
    return model.fit(data, epochs=2, verbose=0, callbacks=callbacks), model.get_weights()


@pytest.mark.parametrize(
    ("replicas", "with_call", "wrapped"),
    [
        (2, True, True),
        pytest.param(1, False, False, marks=pytest.mark.long),
        pytest.param(1, True, False, marks=pytest.mark.long),
        pytest.param(2, False, False, marks=pytest.mark.long),
    ],
)
def test_optimizers_that_the_first_step_builds(tmp_path, replicas, with_call, wrapped):
    how = {"replicas": replicas, "with_call": with_call, "wrapped": wrapped}
    with pytest.raises(Interrupted):
        trained(tmp_path / "disturbed", Interrupt("on_train_batch_end", 5), **how)
    undisturbed = trained(tmp_path / "undisturbed", **how)
    assert_same(undisturbed, trained(tmp_path / "disturbed", **how))


def test_another_optimizer_is_still_an_error(tmp_path):
    with pytest.raises(Interrupted):
        trained(tmp_path, Interrupt("on_train_batch_end", 5), replicas=1, with_call=True)
    with pytest.raises(ValueError, match="The checkpoint does not match this program"):
        trained(tmp_path, replicas=1, with_call=True, wrapped=True)


def test_weights_that_the_first_step_creates_are_named_with_the_remedy(tmp_path):
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.dense(data) ** 2)
            weights = self.dense.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    def fit(*callbacks):
        model = Late()
        model.compile("sgd", jit_compile=False)
        model.fit(INPUTS, batch_size=4, verbose=0, callbacks=[FailureRecovery(tmp_path, every_steps=2), *callbacks])

    with pytest.raises(Interrupted):
        fit(Interrupt("on_train_batch_end", 5))
    with pytest.raises(ValueError, match="If the first step creates it, create it before `fit`"):
        fit()
