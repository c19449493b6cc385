"""Programs in the shape of public ones, which were written for one process: equal to it, or told what to write."""

import functools
import importlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from one_process import in_one_process
from testing.data import Data
from testing.programs import Program
from testing.same_training import assert_same_training

from tfdist.losses import divided_rows
from tfdist.losses import loss_scaling as loss_warnings
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")

RANDOM = np.random.default_rng(0)
BATCH = 16
INPUTS = RANDOM.normal(size=(2 * BATCH, 6)).astype("float32")
TARGETS = RANDOM.normal(size=(2 * BATCH, 4)).astype("float32")
# Sums of 16 values of order 1 are added in another order: a few units in the last place of float32.
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(loss_warnings, "_warned", set())
    monkeypatch.setattr(divided_rows, "_warned", set())


def network(outputs=4):
    initializers = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_initializer=initializers[0]),
            keras.layers.Dense(outputs, kernel_initializer=initializers[1]),
        ]
    )


def program_of(create, targets=TARGETS, loss=None, **arguments):
    """Two steps of a model that `create` returns."""
    data = Data(INPUTS, targets, loss)
    compiled = {"jit_compile": False, **arguments}
    return Program(create, data, lambda: keras.optimizers.SGD(0.1), batch_size=BATCH, epochs=1, compile=compiled)


def fitted(strategy, create, **arguments):
    program_of(create, **arguments).trained(strategy)


def assert_equal_to_one_process(cpus, *program, **arguments):
    assert_same_training(MirroredStrategy(cpus[:2]), program_of(*program, **arguments), TOLERANCE)


class Mean(keras.losses.Loss):
    """Reduces by itself, without a reduction of Keras."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred))


class Twice(keras.losses.MeanSquaredError):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2.0 * super().__call__(y_true, y_pred, sample_weight)


class OfSamples(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred), axis=-1)


class Entropy(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        shares = ops.mean(ops.softmax(y_pred), axis=0)
        return ops.sum(shares * ops.log(shares))


def two_outputs():
    inputs = keras.Input((6,))
    outputs = [keras.layers.Dense(4, name=name, kernel_initializer="ones")(inputs) for name in "ab"]
    return keras.Model(inputs, outputs)


@pytest.mark.filterwarnings("error:A loss is neither")
def test_losses_that_override_call_equal_one_process(cpus):
    assert_equal_to_one_process(cpus, network, loss=OfSamples())
    assert_equal_to_one_process(cpus, two_outputs, [TARGETS] * 2, [Mean(), Twice()], loss_weights=[1.0, 0.5])
    with pytest.warns(UserWarning, match="computes a loss eagerly"):
        assert_equal_to_one_process(cpus, network, loss=Mean(), run_eagerly=True)


def test_a_loss_that_overrides_call_and_is_no_mean_is_named(cpus):
    with pytest.warns(UserWarning, match=rf"neither a mean nor a sum .*{__file__}:\d+, in __call__"):
        fitted(MirroredStrategy(cpus[:2]), network, loss=Entropy())


class Step(keras.Model):
    """A model with its own `train_step`, `step(model, inputs, targets)`, which returns its loss."""

    def __init__(self, step=None):
        super().__init__()
        self.net, self.step, self.tracked = network(), step, keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracked]

    def call(self, inputs):
        return self.net(inputs)

    def update(self, inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.net(inputs, training=True) - targets))
        self.apply(tape, loss)
        return loss

    def apply(self, tape, loss):
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    def logs(self, loss):
        self.tracked.update_state(loss)
        return {"loss": self.tracked.result()}

    def train_step(self, data):
        return self.logs((self.step or Step.update)(self, *data))

    def test_step(self, data):
        return self.logs(tf.reduce_mean(tf.square(self.net(data[0]) - data[1])))


def hidden(method):
    """A decorator whose result has another name."""

    def call(self, data):
        return method(self, data)

    return call


class CompiledStep(Step):
    train_step = tf.function(Step.train_step, jit_compile=True)
    test_step = tf.function(Step.test_step, jit_compile=True)


class TracedStep(Step):
    """As autograph traces it."""

    @tf.function
    def train_step(self, data):
        total = 0
        for turn in tf.range(3):
            total += turn
        if total > 2:
            factor = 2.0
        else:
            factor = 1.0
        return {**Step.train_step(self, data), "factor": tf.convert_to_tensor(factor)}


class HiddenStep(Step):
    train_step = hidden(Step.train_step)


class StepOfTheInstance(Step):
    def __init__(self):
        super().__init__()
        self.train_step = tf.function(functools.partial(Step.train_step, self))


class CompiledLoss(Step):
    """XLA compiles a function that a step calls, which exchanges nothing."""

    @tf.function(jit_compile=True)
    def loss_of(self, inputs, targets):
        return tf.reduce_mean(tf.square(self.net(inputs, training=True) - targets))

    def update(self, inputs, targets):
        with tf.GradientTape() as tape:
            loss = self.loss_of(inputs, targets)
        self.apply(tape, loss)
        return loss

    def train_step(self, data):
        return self.logs(self.update(*data))


@pytest.mark.parametrize(
    "create",
    [
        CompiledStep,
        TracedStep,
        HiddenStep,
        pytest.param(StepOfTheInstance, marks=pytest.mark.long),  # by the same lines as the hidden one
        pytest.param(CompiledLoss, marks=pytest.mark.long),
    ],
)
def test_decorated_steps_equal_one_process(cpus, create):
    assert_equal_to_one_process(cpus, create)


def test_a_compiled_function_with_an_exchange_is_refused(cpus):
    strategy = MirroredStrategy(cpus[:2])
    compiled = functools.partial(Step, tf.function(Step.update, jit_compile=True))
    with pytest.raises(ValueError, match="XLA cannot compile what replicas exchange"):
        fitted(strategy, compiled)
    run = tf.function(lambda: strategy.run(lambda: tf.constant(1.0)), jit_compile=True)
    with pytest.raises(ValueError, match="XLA cannot compile what replicas exchange"):
        run()


def noise(model, inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model.net(inputs + tf.random.normal((BATCH, 6)))))
    model.apply(tape, loss)
    return loss


def real_and_generated(model, inputs, targets):
    both = tf.concat([inputs, 0.3 * tf.ones((BATCH, 6))], axis=0)
    with tf.GradientTape() as tape:
        real, generated = tf.split(model.net(both), 2)
        loss = tf.reduce_mean(tf.square(generated)) - tf.reduce_mean(tf.square(real))
    model.apply(tape, loss)
    return loss


def generator(rows):
    def step(model, inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model.net(tf.random.normal((rows(inputs), 6)))))
        model.apply(tape, loss)
        return loss

    return step


class Reshaped(keras.layers.Layer):
    def call(self, inputs):
        return ops.reshape(inputs, (BATCH, 3, 2))


def fixed_shape():
    return keras.Sequential([keras.Input((6,)), Reshaped()])


def test_an_error_about_the_size_of_the_global_batch_is_explained(cpus):
    for create, arguments in ((functools.partial(Step, noise), {}), (fixed_shape, {"loss": "mse"})):
        with pytest.raises(ValueError, match="shape") as caught:
            fitted(MirroredStrategy(cpus[:2]), create, **arguments)
        (note,) = caught.value.__notes__
        assert "a part of 8 rows of a global batch of 16 rows, which is divided into 2" in note
        assert "`tf.shape(x)[0]`" in note


def test_an_axis_of_views_is_explained(cpus):
    class Views(Step):
        def train_step(self, data):
            return self.logs(self.update(data[0], self.net(data[1])))

    with MirroredStrategy(cpus[:2]).scope():
        model = Views()
        model.compile(keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_generator(
        lambda: iter(INPUTS.reshape(2, 2, 8, 6)), output_signature=tf.TensorSpec((None, 8, 6))
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="slice index 1 of dimension 0") as caught:
        model.fit(data, verbose=0)
    assert "let the first axis of each input hold the samples" in caught.value.__notes__[0]


def test_other_errors_are_not_explained(cpus):
    def step(model, inputs, targets):
        return tf.matmul(inputs, tf.ones((5, 3)))

    with pytest.raises(ValueError, match="Dimensions must be equal, but are 6 and 5") as caught:
        fitted(MirroredStrategy(cpus[:2]), functools.partial(Step, step))
    assert not getattr(caught.value, "__notes__", ())


@pytest.mark.filterwarnings("ignore:A loss is neither")
@pytest.mark.parametrize("step", [real_and_generated, generator(lambda _: BATCH)])
def test_rows_of_the_global_batch_beside_those_of_a_replica_are_named_once(cpus, step):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(MirroredStrategy(cpus[:2]), functools.partial(Step, step))
    said = [str(warning.message) for warning in caught if "rows of a global batch" in str(warning.message)]
    assert len(said) == 1
    assert f"Received: {__file__}:" in said[0]
    assert f"in {step.__name__}" in said[0]
    assert "A step on 8 of the 16 rows" in said[0]


def adversarial(model, inputs, targets):
    """Noise for the rows of a replica and as many generated ones, which are as many as those of the global batch."""
    both = tf.concat([inputs, 0.5 * inputs], axis=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model.net(both + tf.random.normal(both.shape))))
    model.apply(tape, loss)
    return loss


@pytest.mark.filterwarnings("error:A step on")
@pytest.mark.parametrize("step", [adversarial, generator(lambda inputs: 2 * tf.shape(inputs)[0])])
def test_rows_of_the_data_are_not_warned_of(cpus, step):
    fitted(MirroredStrategy(cpus[:2]), functools.partial(Step, step))


def eager_loop(strategy):
    """A chapter's loop without `strategy.run`: tapes, optimizers, plain variables and functions in the scope."""
    with strategy.scope():
        model, adam, sgd = network(), keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.5)
        slots = tf.Variable([0.0, 0.0])

        def loss(inputs, targets):
            return tf.reduce_mean(tf.square(model(inputs, training=True) - targets))

        @tf.function
        def step(inputs, targets):
            with tf.GradientTape() as tape:
                value = loss(inputs, targets)
            weights = model.trainable_weights
            sgd.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
            return value

        keras.utils.clear_session()
        sgd.learning_rate.assign(0.25)
        slots.scatter_nd_update([[1]], [2.0])
        for inputs, targets in tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(BATCH):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    value = loss(inputs, targets)
                steepness = tf.reduce_sum(tape.gradient(value, model.trainable_weights[0]) ** 2)
            adam.apply(outer.gradient(steepness, model.trainable_weights), model.trainable_weights)
            step(inputs, targets)
            with tf.GradientTape() as tape:
                squared = slots * slots
            slots.assign_sub(0.1 * tf.linalg.diag_part(tape.jacobian(squared, slots)))
        copies = [strategy.experimental_local_results(weight.value) for weight in model.trainable_weights]
    model.trainable_weights[0].assign(model.trainable_weights[0] * 1.5)
    with tf.GradientTape() as tape:  # after the scope
        value = loss(INPUTS, TARGETS)
    sgd.apply_gradients([(tape.gradient(value, model.trainable_weights[0]), model.trainable_weights[0])])
    numbers = [float(sgd.learning_rate), int(adam.iterations), int(sgd.iterations)]
    return [*model.get_weights(), slots.numpy(), numbers], copies


def test_statements_outside_of_replicas_equal_one_process(cpus):
    values, copies = eager_loop(MirroredStrategy(cpus[:2]))
    expected, _ = in_one_process(eager_loop)
    for value, reference in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=0, atol=TOLERANCE)
    assert all(np.array_equal(*of_replicas) for of_replicas in copies)


def test_a_reset_graph_keeps_the_scope_also_by_another_import(cpus, monkeypatch):
    monkeypatch.setattr(tf, "compat", tf.compat)  # which the import replaces
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        importlib.import_module("tensorflow.compat.v1").reset_default_graph()
        keras.utils.clear_session()
        assert tf.distribute.get_strategy() is strategy


def test_a_loaded_layer_works_within_the_scope(cpus, tmp_path):
    network().export(str(tmp_path / "model"), verbose=False)
    expected = keras.layers.TFSMLayer(str(tmp_path / "model"), call_endpoint="serve")(INPUTS)
    with MirroredStrategy(cpus[:2]).scope():
        np.testing.assert_array_equal(
            keras.layers.TFSMLayer(str(tmp_path / "model"), call_endpoint="serve")(INPUTS), expected
        )
