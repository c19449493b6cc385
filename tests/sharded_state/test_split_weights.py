"""Weights in parts on the replicas of one process: those of sharded state, their memory, bytes, files and refusals."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

from tfdist.keras_internals.keras_symbols import AutocastScope
from tfdist.keras_internals.split_weight import SplitWeight
from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, ShardedState, replicated_strategy

_random = np.random.default_rng(0)
ROWS = _random.normal(size=(64, 32)).astype("float32")
TARGETS = ROWS.sum(1, keepdims=True) + np.sin(ROWS[:, :1])
TOKENS = _random.integers(0, 300, size=(64, 12)).astype("int32")


def dense(units=200, **options):
    return layers.Dense(units, **{"activation": "tanh", **options})


def mlp(**options):
    return keras.Sequential([keras.Input((32,)), dense(**options), dense(**options), dense(**options), layers.Dense(1)])


def shared_layers():
    inputs, shared = keras.Input((32,)), dense()
    hidden = shared(dense()(inputs))
    return keras.Model(inputs, layers.Dense(1)(shared(hidden) + shared(hidden)))


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.second = dense(), dense()

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 200))

    def call(self, x):
        return x + self.second(self.first(x))


class Subclassed(keras.Model):
    """Blocks with layers in them, a frozen layer, and a weight of the model itself."""

    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = dense(), [Block() for _ in range(3)], layers.Dense(1)
        self.own = self.add_weight(shape=(200, 200), initializer="glorot_uniform", name="own")
        self.blocks[1].trainable = False

    def call(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(keras.ops.matmul(x, self.own))


def rematerialized():
    with keras.RematScope(mode="full"):
        blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.first._remat_mode = block.second._remat_mode = None  # Keras' own fails for layers with more arguments
    return keras.Sequential([keras.Input((32,)), dense(), *blocks, layers.Dense(1)])


def adapted():
    model = mlp()
    for layer in model.layers[:-1]:
        layer.enable_lora(4)
    return model


class Exact(layers.Layer):
    """Computes with the exact weight, also where layers compute with rounded ones."""

    def build(self, shape):
        self.own = self.add_weight(shape=(200, 200), initializer="glorot_uniform")

    def call(self, x):
        with AutocastScope(None):
            return tf.cast(tf.matmul(tf.cast(x, "float32"), self.own), x.dtype)


def mixed_precision():
    policy = "mixed_bfloat16"
    stack = [dense(dtype=policy), Exact(dtype=policy), dense(dtype=policy), layers.Dense(1, dtype=policy)]
    return keras.Sequential([keras.Input((32,)), *stack])


class Penalized(keras.Model):
    """A penalty of the gradient, by a tape within a tape."""

    def __init__(self):
        super().__init__()
        self.network = mlp()

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            slopes = inner.gradient(outputs, x)
            loss = self.compute_loss(x, y, outputs) + 0.1 * tf.reduce_mean(tf.reduce_sum(slopes**2, axis=1))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Adversarial(keras.Model):
    """Two optimizers and two tapes in a step; the second one differentiates through weights that it does not update."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((32,)), dense(), dense(), layers.Dense(32)])
        self.critic = mlp()
        self.optimizers = [optimizers.Adam(1e-3), optimizers.Adam(1e-3)]

    def call(self, x):
        return self.critic(self.generator(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            real, fake = self.critic(x), self.critic(self.generator(x))
            loss = tf.reduce_mean((real - 1.0) ** 2) + tf.reduce_mean(fake**2)
        variables = self.critic.trainable_variables
        self.optimizers[0].apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.critic(self.generator(x)) - 1.0) ** 2)
        variables = self.generator.trainable_variables
        self.optimizers[1].apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def language_model():
    """Tied embedding, attention, and a recurrent layer, whose loop uses gathered weights."""
    inputs, embedding = keras.Input((12,), dtype="int32"), layers.ReversibleEmbedding(300, 64)
    x = embedding(inputs)
    x = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(4, 64)(x, x, use_causal_mask=True)
    x = layers.LSTM(64, return_sequences=True)(x) + dense(64)(dense(256)(x))
    return keras.Model(inputs, embedding(x, reverse=True))


class OwnWeight(layers.Layer):
    """Returns its weight, keeps a tensor of it, and computes with it in a `tf.function`."""

    def build(self, shape):
        self.own = self.add_weight(shape=(200, 200), initializer="glorot_uniform")

    @tf.function
    def product(self, x):
        return tf.tanh(tf.matmul(x, self.own))

    def call(self, x):
        self.kept = tf.transpose(self.own)
        return self.product(self.product(x)), self.own.value


class Unusual(keras.Model):
    """Weights that change between the passes, or in a call, and a branch that one replica alone chooses."""

    def __init__(self):
        super().__init__()
        self.first, self.chosen, self.halved, self.later = [dense() for _ in range(4)]
        self.own = OwnWeight()
        self.spectral, self.last = layers.SpectralNormalization(dense()), layers.Dense(1)

    def build(self, shape):
        self.first.build(shape)
        for layer in (self.spectral, self.own, self.chosen, self.halved, self.later, self.last):
            layer.build((None, 200))
        self.built = True

    def call(self, x, training=False):
        x, weight = self.own(self.spectral(self.first(x), training=training))
        if (context := tf.distribute.get_replica_context()) is not None:
            is_first = tf.equal(context.replica_id_in_sync_group, 0)
            x = tf.cond(is_first, lambda: self.chosen(x), lambda: x)
        return self.last(self.later(self.halved(tf.matmul(x, weight) + tf.matmul(x, self.own.kept))))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.halved.kernel.assign(self.halved.kernel / 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def everything():
    schedule = optimizers.schedules.ExponentialDecay(1e-2, 2, 0.9)
    averages = {"use_ema": True, "ema_overwrite_frequency": 3}
    return optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=0.5, gradient_accumulation_steps=2, **averages)


def momentum():
    return optimizers.SGD(1e-2, momentum=0.9, clipnorm=0.1)


CASES = {
    "adam": (mlp, lambda: optimizers.Adam(1e-3), {}),
    "everything": (mlp, everything, {}),
    "penalties": (lambda: mlp(kernel_regularizer="l2", kernel_constraint="max_norm"), momentum, {}),
    "shared layers": (shared_layers, momentum, {}),
    "subclassed": (Subclassed, momentum, {}),
    "rematerialized": (rematerialized, momentum, {}),
    "LoRA": (adapted, lambda: optimizers.Adam(1e-3), {}),
    "penalized": (Penalized, momentum, {}),
    "adversarial": (Adversarial, momentum, {}),
    "language model": (language_model, lambda: optimizers.Adam(1e-3), {}),
    "unusual": (Unusual, momentum, {}),
    "xla": (mlp, momentum, {"jit_compile": True}),
    "steps per execution": (mlp, momentum, {"steps_per_execution": 3}),
    "mixed precision": (mixed_precision, lambda: optimizers.SGD(1e-2), {}),
}
_SHORT = {"everything", "subclassed", "adversarial", "language model"}


def trained(strategy, name, rows=64, epochs=1):
    """Trains the model of a case; the last batch of 61 rows has fewer than the others."""
    build, optimizer, options = CASES[name]
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = build()
        if name != "language model" and not model.built:
            model.build((None, 32))
        of_tokens = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss=of_tokens if name == "language model" else "mse", **options)
    x, y = (TOKENS, np.roll(TOKENS, -1, axis=1)) if name == "language model" else (ROWS, TARGETS)
    model.fit(x[:rows], y[:rows], 16, epochs, verbose=0, shuffle=False)
    return model


def assert_close(ours, theirs, tolerance):
    for weight, mine, other in zip(ours.weights, ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance, err_msg=weight.path)


@pytest.mark.parametrize(
    "name", [name if name in _SHORT else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_steps_compute_what_they_do_with_whole_weights(cpus, name):
    """Against sharded state. oneDNN fuses other operations in graphs that gather, which rounds otherwise."""
    ours = trained(MirroredStrategy(cpus[:2], shard_weights=True), name, rows=61)
    theirs = trained(MirroredStrategy(cpus[:2], shard_optimizer_state=True), name, rows=61)
    assert sum(isinstance(weight, SplitWeight) for weight in ours.weights) >= 1
    # Sums of 16 rows in float32, and Adam's division by small roots; bfloat16 has 8 bits.
    assert_close(ours, theirs, 3e-3 if name == "mixed precision" else 2e-5)
    x = TOKENS if name == "language model" else ROWS
    np.testing.assert_allclose(ours.predict(x[:10], verbose=0), theirs.predict(x[:10], verbose=0), atol=3e-2)


def test_weights_equal_those_of_one_process(cpus):
    ours = trained(MirroredStrategy(cpus[:3], shard_weights=True), "penalties", epochs=2)
    assert_close(ours, trained(tf.distribute.get_strategy(), "penalties", epochs=2), 1e-6)


@pytest.fixture(scope="module")
def of_three(cpus):
    return trained(MirroredStrategy(cpus[:3], shard_weights=True), "adam", rows=32)


def test_each_replica_holds_a_third(of_three):
    split = [one for one in [*of_three.weights, *of_three.optimizer.variables] if hasattr(one, "parts")]
    for variable in split:
        sizes = [int(part.shape.num_elements()) for part in variable.parts]
        assert sum(sizes) == np.prod(variable.shape)
    of_weights = [[int(part.shape[0]) for part in one.parts] for one in split if isinstance(one, SplitWeight)]
    assert of_weights == [[13334, 13334, 13332]] * 2
    small = [weight for weight in of_three.weights if not isinstance(weight, SplitWeight)]
    assert all(np.prod(weight.shape) < 2**14 for weight in small)


def test_a_weight_is_freed_after_its_forward_pass(cpus):
    """No operation of the backward pass uses what the forward pass has gathered, but for the last layer's."""
    strategy = MirroredStrategy(cpus[:2], shard_weights=True)
    model = trained(strategy, "adam", rows=16)
    step = tf.function(lambda x, y: strategy.run(lambda *batch: model.train_step(batch), args=(x, y)), autograph=False)
    graph = step.get_concrete_function(tf.constant(ROWS[:8]), tf.constant(TARGETS[:8])).graph
    gathers = [one for one in graph.get_operations() if one.type.startswith("CollectiveGather")]
    large = [one for one in gathers if one.inputs[0].shape.num_elements() == 20_000]
    # Two weights on two replicas; those of the first layer of the two, whose inputs have gradients, twice.
    assert len(large) == 2 * 3


def test_bytes_of_a_step(cpus):
    """Gathered, all but the last one's again, and scattered: the sum of gradients goes as two all-reduces on CPUs."""
    strategy = MirroredStrategy(cpus[:2], shard_weights=True)
    before = strategy.communication.wire_bytes
    trained(strategy, "steps per execution", rows=48)
    sent = (strategy.communication.wire_bytes - before) / 3
    of_weights = 4 * 40_000
    # Of two weights each replica sends half: three gathers; sums of all values; biases and small weights besides.
    assert sent == pytest.approx(3 * of_weights / 2 + 2 * of_weights, rel=0.3)


def test_files_have_whole_weights(of_three, cpus, tmp_path):
    of_three.save(tmp_path / "model.keras")
    of_three.save_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=of_three).save(tmp_path / "checkpoint")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert not any(isinstance(weight, SplitWeight) for weight in plain.weights)
    strategy = MirroredStrategy(cpus[:2], shard_weights=True)
    with strategy.scope():
        loaded, other, restored = keras.models.load_model(tmp_path / "model.keras"), mlp(), mlp()
    other.load_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=restored).restore(tf.train.latest_checkpoint(tmp_path)).expect_partial()
    for model in (plain, loaded, other, restored):
        for mine, saved in zip(model.get_weights(), of_three.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, saved)


def refused(cpus, **arguments):
    return MirroredStrategy(cpus[:2], **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shard_weights": "all"}, "Invalid `shard_weights`. Received: 'all'"),
        ({"shard_weights": True, "compression": "int8"}, "uncompressed. Received: compression='int8'"),
    ],
)
def test_arguments_that_are_refused(cpus, arguments, message):
    with pytest.raises(ValueError, match=message):
        refused(cpus, **arguments)


def test_nccl_between_workers_is_refused(cpus, monkeypatch):
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": task}))
    monkeypatch.setattr(replicated_strategy, "_check_nccl_has_gpu", lambda options: None)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
    )
    with pytest.raises(ValueError, match="Received: NCCL in `communication_options`"):
        MultiWorkerMirroredStrategy(communication_options=options, shard_weights=True)


def test_options_that_are_refused():
    with pytest.raises(ValueError, match="Received: ShardedState\\(weights=True, weights_dtype='bfloat16'\\)"):
        ShardedState(weights=True, weights_dtype="bfloat16")
    with pytest.raises(ValueError, match="Invalid `weights` of a ShardedState. Received: 1"):
        ShardedState(weights=1)


def test_optimizers_of_whole_variables_are_refused(cpus):
    strategy = MirroredStrategy(cpus[:2], shard_weights=True)
    with strategy.scope():
        model = mlp()
        model.compile(optimizers.Lamb(), loss="mse")
    with pytest.raises(ValueError, match="must update each value by itself. Received: Lamb"):
        model.fit(ROWS, TARGETS, 16, verbose=0)


def test_functions_without_a_strategy_are_refused(of_three):
    """One replica would wait for the others forever."""
    with pytest.raises(RuntimeError, match="A weight in parts cannot be read within a function"):
        tf.function(of_three)(ROWS[:2])


class Clipped(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.1)
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


def test_gradients_that_a_program_clips_are_refused(cpus):
    """Each replica would clip its part by the norm of this part."""
    with MirroredStrategy(cpus[:2], shard_weights=True).scope():
        model = Clipped([keras.Input((32,)), dense(), dense(), layers.Dense(1)])
        model.compile("sgd", loss="mse")
    with pytest.raises(ValueError, match="cannot clip or normalize it. Received: a gradient of 'clipped.*test_split"):
        model.fit(ROWS, TARGETS, 16, verbose=0)


def test_eager_steps_are_refused(cpus):
    strategy = MirroredStrategy(cpus[:2], shard_weights=True)
    with strategy.scope():
        model = mlp()
        model.compile("adam", loss="mse", run_eagerly=True)
    with pytest.raises(ValueError, match="compiled with `run_eagerly=True`"):
        model.fit(ROWS, TARGETS, 16, verbose=0)
