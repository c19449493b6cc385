"""Models with a `train_step` and no `call`, as keras.io's diffusion models are, or one that takes other inputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_process import in_one_process

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")

INPUTS = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")


class Autoencoder(keras.Model):
    def __init__(self, is_built=True):
        super().__init__()
        keras.utils.set_random_seed(0)
        first = [keras.Input((4,))] if is_built else []
        self.encoder = keras.Sequential([*first, keras.layers.Dense(3)])
        self.decoder = keras.Sequential([*([keras.Input((3,))] if is_built else []), keras.layers.Dense(4)])
        self.tracker = keras.metrics.Mean(name="tracked")

    @property
    def metrics(self):
        return [*super().metrics, self.tracker]

    def train_step(self, images):
        with tf.GradientTape() as tape:
            outputs = self.decoder(self.encoder(images, training=True), training=True)
            if isinstance(self.loss, str):
                loss = self.compute_loss(y=images, y_pred=outputs)
            else:
                loss = tf.reduce_mean(self.loss(images, outputs))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result(), **self.compute_metrics(images, images, outputs)}


class Translator(Autoencoder):
    """A model whose `train_step` takes a dictionary, and whose `call` takes a list, as that of a transformer does."""

    def call(self, inputs):
        source, target = inputs[0], inputs[1]
        return self.decoder(self.encoder(source)) + target

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            outputs = self([batch["source"], batch["target"]])
            loss = self.compute_loss(y=batch["target"], y_pred=outputs)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}


def translated(strategy, *callbacks, is_built=True, epochs=2):
    with strategy.scope():
        model = Translator(is_built)
        model.compile(keras.optimizers.Adam(0.01), loss="mse")
    data = tf.data.Dataset.from_tensor_slices({"source": INPUTS, "target": INPUTS[::-1]}).batch(5)
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return history.history, model.get_weights()


def trained(strategy, *callbacks, is_built=True, loss=keras.losses.mean_squared_error, epochs=2, **arguments):
    with strategy.scope():
        model = Autoencoder(is_built)
        model.compile(keras.optimizers.Adam(0.01), loss=loss, **arguments)
    history = model.fit(
        tf.data.Dataset.from_tensor_slices(INPUTS).batch(5), epochs=epochs, verbose=0, callbacks=list(callbacks)
    )
    return history.history, model.get_weights()


def assert_equal(one, other):
    assert one[0].keys() == other[0].keys()
    for a, b in zip([*one[0].values(), *one[1]], [*other[0].values(), *other[1]], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("is_built", "metrics"),
    [
        (False, ["mae"]),
        pytest.param(True, [], marks=pytest.mark.long),
        pytest.param(True, ["mae"], marks=pytest.mark.long),
        pytest.param(False, [], marks=pytest.mark.long),
    ],
)
def test_a_model_without_call_trains_as_in_one_process(cpus, is_built, metrics):
    arguments = {"is_built": is_built, "metrics": metrics}
    ours = trained(MirroredStrategy(cpus[:2]), **arguments)
    assert_equal(ours, in_one_process(trained, **arguments))


def test_the_compiled_loss_is_built_in_the_first_step(cpus):
    assert_equal(trained(MirroredStrategy(cpus[:2]), loss="mse"), in_one_process(trained, loss="mse"))


@pytest.mark.long  # tests/callbacks/test_failure_recovery_optimizers.py recovers one, too
def test_it_is_recovered(cpus, tmp_path):
    whole = trained(MirroredStrategy(cpus[:2]), FailureRecovery(tmp_path / "whole"), epochs=2)
    trained(MirroredStrategy(cpus[:2]), FailureRecovery(tmp_path / "halved"), epochs=1)
    resumed = trained(MirroredStrategy(cpus[:2]), FailureRecovery(tmp_path / "halved"), epochs=2)
    for ours, theirs in zip(resumed[1], whole[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("is_built", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_step_may_call_the_model_on_other_inputs_than_those_of_fit(cpus, is_built):
    ours = translated(MirroredStrategy(cpus[:2]), is_built=is_built)
    assert_equal(ours, in_one_process(translated, is_built=is_built))


@pytest.mark.long  # tests/callbacks/test_failure_recovery_optimizers.py recovers one, too
def test_a_model_that_its_step_calls_on_other_inputs_is_recovered(cpus, tmp_path):
    whole = translated(MirroredStrategy(cpus[:2]), FailureRecovery(tmp_path / "whole"))
    translated(MirroredStrategy(cpus[:2]), FailureRecovery(tmp_path / "halved"), epochs=1)
    resumed = translated(MirroredStrategy(cpus[:2]), FailureRecovery(tmp_path / "halved"))
    for ours, theirs in zip(resumed[1], whole[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
