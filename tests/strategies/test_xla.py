"""`jit_compile=True`: XLA compiles layers, losses and updates on each replica, and the numbers are those without."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_internals import compiled_calls, optimizers
from tfdist.keras_internals.auto_jit_compile import jit_compiles
from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals.xla_functions import call_compiled, patch_random_numbers

# XLA adds in another order: 20 updates of rate 0.01 change float32 weights below 1 by less than this.
TOLERANCE = 1e-5
RANDOM = np.random.default_rng(0)
ROWS = RANDOM.normal(size=(40, 8)).astype("float32")
TOKENS = RANDOM.integers(0, 20, (40, 5))
IMAGES = RANDOM.normal(size=(40, 6, 6, 3)).astype("float32")
LABELS = RANDOM.integers(0, 3, 40)


class OwnStep(keras.Model):
    """Two optimizers, two tapes, a loss of the user, as GANs have."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)
        self.tracked = keras.metrics.Mean(name="own")

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 4))

    def call(self, inputs):
        return self.second(self.first(inputs))

    def compile(self, optimizer, **arguments):
        super().compile(optimizer, **arguments)
        self.other = keras.optimizers.Adam(0.02)

    def train_step(self, data):
        rows, labels = data
        labels = tf.cast(labels, "float32")[:, None]
        for optimizer, part in ((self.optimizer, self.first), (self.other, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.second(self.first(rows)) - labels) ** 2)
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracked.update_state(loss)
        return {"own": self.tracked.result()}


def dense():
    middle = [keras.layers.Dropout(0.3, seed=5), keras.layers.BatchNormalization()]
    return ROWS, [keras.Input((8,)), keras.layers.Dense(16, activation="gelu"), *middle, keras.layers.Dense(3)]


def convolutions():
    first = keras.layers.Conv2D(4, 3, activation="relu", activity_regularizer="l2")  # adds a loss in its call
    rest = [keras.layers.Flatten(), keras.layers.Dense(3, kernel_regularizer="l2")]
    return IMAGES, [keras.Input((6, 6, 3)), first, *rest]


def masks():
    embedding = keras.layers.Embedding(20, 8, mask_zero=True)
    pooling = keras.layers.GlobalAveragePooling1D()
    return TOKENS, [keras.Input((5,), dtype="int32"), embedding, pooling, keras.layers.Dense(3)]


def masked_sequences():
    return TOKENS, [
        keras.Input((5,), dtype="int32"),
        keras.layers.Embedding(20, 8, mask_zero=True),
        keras.layers.Dense(3),
    ]


def synchronized():
    middle = keras.layers.BatchNormalization(synchronized=True)
    return ROWS, [keras.Input((8,)), keras.layers.Dense(6, activation="relu"), middle, keras.layers.Dense(3)]


def recurrent():
    return TOKENS, [
        keras.Input((5,), dtype="int32"),
        keras.layers.Embedding(20, 8, mask_zero=True),
        keras.layers.LSTM(6),
        keras.layers.Dense(3),
    ]


def outcome(strategy, build, *, jit_compile, optimizer=None, batch_size=8, **arguments):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        optimizer = keras.optimizers.Adam(0.01) if optimizer is None else optimizer()
        if build is OwnStep:
            inputs, model, loss = ROWS, OwnStep(), None
            model.build((None, 8))
        else:
            inputs, layers = build()
            model = keras.Sequential(layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = None if loss is None else ["accuracy"]
        model.compile(optimizer, loss=loss, metrics=metrics, jit_compile=jit_compile, **arguments)
    labels = np.repeat(LABELS[:, None], 5, axis=1) if build is masked_sequences else LABELS
    logs = model.fit(inputs, labels, batch_size=batch_size, epochs=4, shuffle=False, verbose=0).history
    if batch_size == 8:  # every size of a batch takes seconds to compile
        return model.get_weights(), logs
    logs |= model.evaluate(inputs, labels, batch_size=batch_size, verbose=0, return_dict=True)
    return model.get_weights(), logs, model.predict(inputs, batch_size=batch_size, verbose=0)


@pytest.fixture
def compiled(monkeypatch):
    """What XLA has compiled: of layers and losses, and of updates."""
    counts = {"calls": 0, "updates": 0}

    def counted(name):
        def call(function, tensors, *handles):
            results = call_compiled(function, tensors, *handles)
            counts[name] += results is not None
            return results

        return call

    monkeypatch.setattr(compiled_calls, "call_compiled", counted("calls"))
    monkeypatch.setattr(optimizers, "call_compiled", counted("updates"))
    return counts


HAS_SPARSE_GRADIENTS = (masks, masked_sequences, recurrent)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0)


def clipping():
    return keras.optimizers.SGD(0.05, clipnorm=0.5)


def accumulating():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (dense, {"batch_size": 7}),  # the last batch is smaller, and batches are unequal on two replicas
        (dense, {"optimizer": scaled, "steps_per_execution": 3}),
        (recurrent, {}),
        (OwnStep, {}),
        pytest.param(dense, {"optimizer": accumulating}, marks=pytest.mark.long),
        pytest.param(convolutions, {}, marks=pytest.mark.long),
        pytest.param(synchronized, {}, marks=pytest.mark.long),
        pytest.param(masks, {"optimizer": clipping}, marks=pytest.mark.long),
        pytest.param(masked_sequences, {}, marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ("-".join(value) or "plain"),
)
def test_training_equals_one_without_xla(cpus, compiled, build, arguments):
    without = outcome(MirroredStrategy(cpus[:2]), build, jit_compile=False, **arguments)
    assert compiled == {"calls": 0, "updates": 0}
    by_xla = outcome(MirroredStrategy(cpus[:2]), build, jit_compile=True, **arguments)
    assert compiled["calls"] >= 4  # two replicas, a layer or model and a loss
    assert compiled["updates"] >= (0 if build in HAS_SPARSE_GRADIENTS else 2)
    for found, expected in zip(by_xla, without, strict=True):
        tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE), found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_uniform_numbers_are_those_without_xla(dtype):
    """As floats differ in their last bit where XLA multiplies and adds at once, their digits are compared."""
    patch_random_numbers()
    seed = tf.constant([5, 7])

    def drop(seed):
        return tf.nn.experimental.stateless_dropout(tf.ones([3, 77], dtype), 0.4, seed=seed)

    by_xla = tf.function(lambda seed: call_compiled(lambda given: [drop(given)], [seed]), autograph=False)(seed)[0]
    np.testing.assert_array_equal(by_xla, tf.function(drop)(seed))


def unused_head():
    """Its weights have no gradient, so a decay of weights must leave them."""
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(6, activation="relu")(inputs)
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(hidden) for name in "ab"})
    return model, {"loss": {"a": "mse"}, "optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.1)}


def loss_of_two_kinds():
    def mean_and_sum(targets, outputs):
        squares = keras.ops.square(targets - outputs)
        return keras.ops.mean(squares) + 0.01 * keras.ops.sum(squares)

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]), {"loss": mean_and_sum}


def recurrent_layer_that_adds_a_loss():
    layers = [keras.layers.Reshape((4, 2)), keras.layers.LSTM(4, activity_regularizer="l2"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *layers]), {"loss": "mse"}


class Condition(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return keras.ops.cond(keras.ops.sum(inputs) > 0, lambda: self.dense(inputs), lambda: -self.dense(inputs))


def condition():
    return keras.Sequential([keras.Input((8,)), Condition()]), {"loss": "mse"}


class Keeping(keras.layers.Layer):
    """Keeps a tensor of its call for a loss, as attention layers keep their scores."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        self.kept = {"scores": [self.dense(inputs)]}
        return self.kept["scores"][0] * 1.0


def tensor_in_an_attribute():
    layer = Keeping()

    def loss(targets, outputs):
        return keras.ops.square(targets - layer.kept["scores"][0])

    return keras.Sequential([keras.Input((8,)), layer]), {"loss": loss}


def normal_random_numbers():
    layers = [keras.layers.GaussianNoise(0.3, seed=1), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *layers]), {"loss": "mse"}


class ByPython(keras.layers.Layer):
    """Computes by operations that XLA does not know."""

    def call(self, inputs):
        numbers = tf.strings.to_number(tf.strings.as_string(inputs))
        return numbers + tf.ensure_shape(tf.numpy_function(lambda rows: 0 * rows, [inputs], tf.float32), inputs.shape)


def operations_unknown_to_xla():
    return keras.Sequential([keras.Input((8,)), ByPython(), keras.layers.Dense(1)]), {"loss": "mse"}


class StatefulRandomNumbers(keras.layers.Layer):
    def call(self, inputs):
        return tf.nn.dropout(inputs, 0.4, seed=3) + tf.random.normal(tf.shape(inputs), seed=5)


def stateful_random_numbers():
    tf.random.set_seed(4)
    return keras.Sequential([keras.Input((8,)), StatefulRandomNumbers(), keras.layers.Dense(1)]), {"loss": "mse"}


class StepOf(keras.Model):
    """A `train_step` with a loss of the user, `loss_of(dense, rows, targets)`."""

    def __init__(self, loss_of):
        super().__init__()
        self.loss_of = loss_of
        self.dense = keras.layers.Dense(1, activation="tanh")
        self.normal = keras.layers.BatchNormalization()
        self.net = keras.Sequential([keras.Input((8,)), self.dense, self.normal])

    def call(self, inputs):
        return self.net(inputs)

    def train_step(self, data):
        rows, targets = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, rows, targets)
        variables = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"own": loss}


def vectorized():
    def loss_of(model, rows, targets):
        return tf.reduce_mean((tf.vectorized_map(lambda row: model.dense(row[None])[0], rows) - targets) ** 2)

    return StepOf(loss_of), {}


def forward_accumulator():
    def loss_of(model, rows, targets):
        with tf.autodiff.ForwardAccumulator(rows, tf.ones_like(rows)) as accumulator:
            outputs = model.dense(rows)
        return tf.reduce_mean(accumulator.jvp(outputs) ** 2)

    return StepOf(loss_of), {}


def stateless():
    def loss_of(model, rows, targets):
        trained = [variable.value for variable in model.net.trainable_variables]
        others = [variable.value for variable in model.net.non_trainable_variables]
        outputs, _ = model.net.stateless_call(trained, others, rows, training=True)
        return tf.reduce_mean((outputs - targets) ** 2)

    return StepOf(loss_of), {}


@pytest.mark.parametrize(
    "program",
    [
        unused_head,
        recurrent_layer_that_adds_a_loss,
        tensor_in_an_attribute,
        normal_random_numbers,
        operations_unknown_to_xla,
        stateful_random_numbers,
        pytest.param(loss_of_two_kinds, marks=pytest.mark.long),
        pytest.param(condition, marks=pytest.mark.long),
        pytest.param(vectorized, marks=pytest.mark.long),
        pytest.param(forward_accumulator, marks=pytest.mark.long),
        pytest.param(stateless, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:A loss is neither a mean", "ignore:Gradients do not exist")
def test_what_xla_would_change_is_left_out(cpus, program):
    """Each of these was wrong, or an error, when it was compiled."""
    targets = ROWS.sum(axis=1, keepdims=True)
    weights = []
    for jit_compile in (False, True):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with MirroredStrategy(cpus[:2]).scope():
            model, arguments = program()
            model.compile(**{"optimizer": keras.optimizers.SGD(0.05), **arguments}, jit_compile=jit_compile)
        model.fit(ROWS, {"a": targets} if program is unused_head else targets, batch_size=8, epochs=2, verbose=0)
        weights.append(model.get_weights())
    for found, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def attention(width=4, heads=1, *others):
    tokens = keras.Input((5, width))
    attended = keras.layers.MultiHeadAttention(heads, width // heads)(tokens, tokens)
    for layer in others:
        attended = layer(attended)
    return keras.Model(tokens, keras.layers.Dense(3)(attended))


LARGE = 512  # 4 matrices: 1.05 million parameters
DECISIONS = {
    "large attention": (lambda: attention(LARGE, 8), "auto", True),
    "small attention": (attention, "auto", False),
    "attention and convolutions": (lambda: attention(LARGE, 8, keras.layers.Conv1D(8, 1)), "auto", False),
    "large matrices": (lambda: keras.Sequential([keras.Input((1100,)), keras.layers.Dense(1000)]), "auto", False),
    "forbidden": (lambda: attention(LARGE, 8), False, False),
    "demanded": (attention, True, True),
}


@pytest.mark.parametrize(("build", "jit_compile", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_auto_compiles_where_it_was_measured_to_pay(cpus, build, jit_compile, expected):
    with MirroredStrategy(cpus[:2]).scope():
        model = build()
        model.compile("sgd", "mse", jit_compile=jit_compile)
    assert jit_compiles(model) is expected
    assert bool(model.jit_compile) is (jit_compile is True)  # what Keras compiles
    assert json.loads(json.dumps(model.get_compile_config()))["jit_compile"] == jit_compile
    spec = tf.zeros([4, 5, LARGE]), tf.zeros([4])
    assert jit_compiles(model, spec) is expected


def test_auto_leaves_samples_without_a_fixed_shape(cpus):
    with MirroredStrategy(cpus[:2]).scope():
        model = attention(LARGE, 8)
        model.compile("sgd", "mse")
    seen = []

    @tf.function(input_signature=[tf.TensorSpec([None, None, LARGE])])
    def of(rows):
        seen.append((jit_compiles(model, (rows, rows[:, 0, 0])), jit_compiles(model, rows[:, 0])))

    of(tf.zeros([2, 3, LARGE]))
    assert seen == [(False, True)]


def test_auto_of_other_strategies_is_that_of_keras(cpus):
    MirroredStrategy(cpus[:2])  # patches Keras
    model = attention()
    model.compile("sgd", "mse")
    assert model.jit_compile is False and not jit_compiles(model)


def test_auto_trains_a_large_model_with_attention_by_xla(cpus, compiled):
    with MirroredStrategy(cpus[:2]).scope():
        model = attention(LARGE, 8)
        model.compile("sgd", "mse")
    model.fit(np.zeros((4, 5, LARGE), "float32"), np.zeros((4, 5, 3), "float32"), batch_size=4, verbose=0)
    assert compiled["calls"] >= 4 and compiled["updates"] == 2
