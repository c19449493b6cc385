"""`jit_compile=True`: XLA compiles layers, losses and updates on each replica, and the numbers are those without."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from xla_counts import TOLERANCE

from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals.xla_functions import call_compiled, patch_random_numbers

RANDOM = np.random.default_rng(0)
SAMPLES = 40
ROWS = RANDOM.normal(size=(SAMPLES, 8)).astype("float32")
TOKENS = RANDOM.integers(0, 20, (SAMPLES, 5))
IMAGES = RANDOM.normal(size=(SAMPLES, 6, 6, 3)).astype("float32")
LABELS = RANDOM.integers(0, 3, SAMPLES)


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


def outcome(strategy, build, *, jit_compile, optimizer=None, batch_size=8, rows=SAMPLES, **arguments):
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
    inputs, labels = inputs[:rows], labels[:rows]
    logs = model.fit(inputs, labels, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    if batch_size == 8:  # every size of a batch takes seconds to compile
        return model.get_weights(), logs
    logs |= model.evaluate(inputs, labels, batch_size=batch_size, verbose=0, return_dict=True)
    return model.get_weights(), logs, model.predict(inputs, batch_size=batch_size, verbose=0)


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
        # Two replicas have 2 samples and 1; of the last batch, which is smaller, 1 each.
        (dense, {"batch_size": 3, "rows": 38}),
        pytest.param(dense, {"optimizer": scaled, "steps_per_execution": 3}, marks=pytest.mark.long),
        pytest.param(recurrent, {}, marks=pytest.mark.long),
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


def test_rows_of_tables_are_compressed_with_xla_too(cpus):
    sent = []
    for compiled in (False, True):
        strategy = MirroredStrategy(cpus[:2], compression="int8")
        with strategy.scope():
            layers = [keras.layers.Embedding(512, 16), keras.layers.Flatten(), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, jit_compile=compiled)
        model.fit(TOKENS, LABELS, batch_size=SAMPLES, verbose=0)
        sent.append({method: count.wire_bytes for method, count in strategy.communication_by_method.items()})
    assert sent[0] == sent[1] and "uncompressed" not in sent[1]
