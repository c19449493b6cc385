"""A step that jumps leaves nothing behind: the training is that of one process without its batch."""

import logging
import math
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.callbacks import FailureRecovery, GradientAccumulation, SpikeGuard, WeightComparison
from tfdist.callbacks.spike_guard import Spike, SpikeError
from tfdist.compression import Policy
from tfdist.elastic.step_transactions import WrittenVariables
from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
_STEPS, _BATCH = 24, 6
_NOT_FINITE, _LARGE = 4, 19  # batches
_random = np.random.default_rng(0)
ROWS = _random.normal(size=(_STEPS, _BATCH, 4)).astype("float32")
TARGETS = np.tanh(ROWS.sum(axis=2, keepdims=True))
SPIKES = TARGETS.copy()
SPIKES[_NOT_FINITE, 2] = np.nan
SPIKES[_LARGE] *= 1e5
GOOD = [step for step in range(_STEPS) if step not in (_NOT_FINITE, _LARGE)]


class RawLoss(keras.Sequential):
    """Its step returns its loss and has no metric."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class OtherName(RawLoss):
    """Its step returns its loss by another name, so that only the gradients show a spike."""

    def train_step(self, data):
        return {"error": super().train_step(data)["loss"]}


class LossOfSamples(RawLoss):
    """Its metric counts the loss of each sample."""

    def __init__(self, layers):
        super().__init__(layers)
        self.mean = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((self(x, training=True) - y) ** 2, axis=1)
            loss = tf.reduce_mean(losses)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.mean.update_state(losses)
        return {"loss": self.mean.result()}


def _scaled_adam():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=4.0)


def model_under(strategy, kind=keras.Sequential, optimizer=lambda: keras.optimizers.Adam(0.01), **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [
            keras.layers.Dense(8, "tanh"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
        model = kind([keras.Input((4,)), *layers])
        model.compile(optimizer(), "mse", metrics=["mae"] if kind is keras.Sequential else None, **options)
    return model


def fit(model, targets, *callbacks, steps=None, **options):
    """Trains on the batches `steps`, by default all; returns the History and all variables."""
    steps = list(range(_STEPS)) if steps is None else steps
    data = [array[steps].reshape(-1, array.shape[2]) for array in (ROWS, targets)]
    history = model.fit(*data, batch_size=_BATCH, shuffle=False, verbose=0, callbacks=[*callbacks], **options)
    variables = [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]
    return history.history, variables


def assert_same(one, other):
    """Compares History and variables bit by bit."""
    assert one[0] == other[0]
    for number, (value, expected) in enumerate(zip(one[1], other[1], strict=True)):
        np.testing.assert_array_equal(value, expected, str(number))


CASES = {
    "several steps in one call": (2, {}, {"steps_per_execution": 5}),
    "residuals": (2, {"compression": Policy("topk:0.3", dense_below=0)}, {}),
    "a loss without a metric": (1, {}, {"kind": RawLoss}),
}
MORE_CASES = {
    "one device": (1, {}, {}),
    "XLA": (1, {}, {"jit_compile": True}),
    "step by step": (1, {}, {"run_eagerly": True}),
    "a loss scale": (1, {}, {"optimizer": _scaled_adam}),
    "an average": (1, {}, {"optimizer": lambda: keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True)}),
    "a loss of samples": (2, {}, {"kind": LossOfSamples}),
    "gradients alone": (2, {}, {"kind": OtherName}),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE_CASES)])
def test_a_training_is_that_without_the_batches_that_jump(cpus, case):
    devices, of_strategy, of_model = {**CASES, **MORE_CASES}[case]

    def model():
        return model_under(MirroredStrategy(cpus[:devices], **of_strategy), **of_model)

    guard = SpikeGuard(window=8, deviations=100.0)
    assert_same(fit(model(), SPIKES, guard, epochs=2), fit(model(), SPIKES, steps=GOOD, epochs=2))
    name = "gradient norm" if case == "gradients alone" else "loss"
    assert [(spike.epoch, spike.batch, spike.name) for spike in guard.spikes] == [
        (epoch, batch, name) for epoch in (0, 1) for batch in (_NOT_FINITE, _LARGE)
    ]
    assert all(spike.value > spike.limit for spike in guard.spikes[1::2])


@pytest.mark.parametrize("micro_batches", [pytest.param(None, marks=pytest.mark.long), 2])
def test_values_are_those_of_the_global_batch(cpus, micro_batches):
    seen = []
    # The last batch has two rows for four devices.
    strategy = MultiWorkerMirroredStrategy(micro_batches=2) if micro_batches else MirroredStrategy(cpus[:2])

    class See(SpikeGuard):
        def _decide(self, logs):
            seen.append(self.values.read())
            return super()._decide(logs)

    weights = tf.constant([[1.0], [2.0], [3.0], [4.0]])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.0, global_clipnorm=0.1), "mse")
    model.set_weights([weights.numpy()])
    rows, targets = ROWS.reshape(-1, 4)[:20], TARGETS.reshape(-1, 1)[:20]
    model.fit(rows, targets, batch_size=6, shuffle=False, verbose=0, callbacks=[See()])
    assert len(seen) == 4
    for step, values in enumerate(seen):
        x, y = (array[6 * step : 6 * step + 6].astype("float64") for array in (rows, targets))
        error = x @ weights.numpy() - y
        np.testing.assert_allclose(values["loss"], np.mean(error**2), rtol=1e-6)
        np.testing.assert_allclose(values["gradient norm"], np.linalg.norm(2 * x.T @ error / len(x)), rtol=1e-6)


@pytest.mark.long
def test_gradients_that_overflow_only_lower_the_loss_scale(cpus):
    def trained(*callbacks):
        optimizer = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**127)  # noqa: E731
        return fit(model_under(MirroredStrategy(cpus[:1]), optimizer=optimizer), TARGETS, *callbacks)

    guard = SpikeGuard()
    result = trained(guard)
    assert guard.spikes == []
    assert_same(result, trained())


def test_the_model_goes_back_and_the_batches_are_not_repeated(cpus):
    guard = SpikeGuard(window=8, deviations=100.0, go_back_steps=4)
    model = model_under(MirroredStrategy(cpus[:1]), lambda layers: keras.Sequential([layers[0], layers[-1]]))
    _, variables = fit(model, SPIKES, guard)
    # 18 steps count before batch 19, with kept states after 12 and 16: back to that after 12, which are 13 batches.
    assert [(spike.batch, spike.steps_back) for spike in guard.spikes] == [(_NOT_FINITE, 0), (_LARGE, 6)]
    same = model_under(MirroredStrategy(cpus[:1]), lambda layers: keras.Sequential([layers[0], layers[-1]]))
    _, expected = fit(same, SPIKES, steps=[*range(4), *range(5, 13), *range(20, 24)])
    for value, expected_value in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(value, expected_value)


def test_too_many_in_a_row_end_the_training_with_the_state_before_them(cpus):
    targets, said = TARGETS.copy(), []
    targets[10:] = np.inf
    guard = SpikeGuard(most_in_a_row=3, on_spike=said.append)
    model = model_under(MirroredStrategy(cpus[:1]))
    with pytest.raises(SpikeError, match=r"More than 3 training steps in a row.*in batch 13 of epoch 0") as raised:
        fit(model, targets, guard)
    assert said == guard.spikes and [spike.batch for spike in said] == [10, 11, 12, 13]
    assert raised.value.spike is said[-1]
    assert int(model.optimizer.iterations) == 10
    _, expected = fit(model_under(MirroredStrategy(cpus[:1])), TARGETS, steps=list(range(10)))
    for value, expected_value in zip(model.get_weights(), expected, strict=False):
        np.testing.assert_array_equal(value, expected_value)


def test_callbacks_see_the_logs_of_the_step_before(cpus, caplog):
    seen = []
    see = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    targets = TARGETS.copy()
    targets[0], targets[3] = np.nan, np.nan
    with caplog.at_level(logging.WARNING, "tfdist"):
        fit(model_under(MirroredStrategy(cpus[:1])), targets, SpikeGuard(), see, keras.callbacks.TerminateOnNaN())
    assert seen[0] == 0 and seen[3] == seen[2] and all(map(math.isfinite, seen)) and len(seen) == _STEPS
    assert "a training step is taken back: loss nan, limit inf, in batch 3 of epoch 0, from 0" in caplog.text


def test_a_restarted_training_continues_with_the_statistics(cpus, tmp_path):
    def trained(*callbacks):
        guard = SpikeGuard(window=8, deviations=100.0)
        return guard, fit(model_under(MirroredStrategy(cpus[:1])), SPIKES, guard, *callbacks)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 12:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        trained(FailureRecovery(tmp_path, every_steps=10, background=False), Stop())
    resumed, one = trained(FailureRecovery(tmp_path))
    complete, other = trained()
    assert [spike.batch for spike in resumed.spikes] == [spike.batch for spike in complete.spikes]
    assert resumed.spikes[1] == complete.spikes[1]
    assert_same(one, other)


def test_the_next_fit_is_without_the_guard(cpus):
    model = model_under(MirroredStrategy(cpus[:1]))
    fit(model, TARGETS, SpikeGuard())
    history, _ = fit(model, SPIKES)
    assert math.isnan(history["loss"][0])


def test_a_first_step_whose_variables_cannot_be_taken_back_says_so(cpus):
    targets = np.full_like(TARGETS, np.nan)
    model = model_under(MirroredStrategy(cpus[:2], compression=Policy("topk:0.3", dense_below=0)))
    with pytest.raises(SpikeError, match="The first training step has jumped, and cannot be taken back"):
        fit(model, targets, SpikeGuard())


def refused(cpus, callbacks, strategy=lambda cpus: MirroredStrategy(cpus[:2]), **options):
    with pytest.raises(ValueError, match="SpikeGuard") as raised:
        fit(model_under(strategy(cpus), **options), TARGETS, *callbacks)
    return str(raised.value)


def test_what_cannot_be_taken_back_is_refused(cpus):
    optimizer = lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)  # noqa: E731
    assert "over 2 micro-steps" in refused(cpus, [SpikeGuard()], optimizer=optimizer)
    assert "over 3 micro-steps" in refused(cpus, [GradientAccumulation(3), SpikeGuard()])
    assert "another SpikeGuard" in refused(cpus, [SpikeGuard(), SpikeGuard()])
    sharded = lambda cpus: MirroredStrategy(cpus[:2], shard_optimizer_state=True)  # noqa: E731
    assert "different parts of the optimizer's state" in refused(cpus, [SpikeGuard()], sharded)
    assert "under no strategy" in refused(cpus, [SpikeGuard()], lambda cpus: tf.distribute.get_strategy())


@pytest.mark.parametrize(
    "arguments",
    [
        {"window": 0},
        {"warm_up": 0},
        {"warm_up": 9, "window": 8},
        {"most_in_a_row": -1},
        {"go_back_steps": 0},
        {"deviations": -1},
        {"factor": "2"},
    ],
)
def test_invalid_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=f"Invalid `{next(iter(arguments))}`"):
        SpikeGuard(**arguments)


def test_spikes_are_saved_with_every_bit():
    guard = SpikeGuard()
    guard.spikes = [Spike(1, 2, "loss", 3.5, 2.5)]
    other = SpikeGuard()
    other.set_state(guard.get_state())
    assert other.spikes == guard.spikes


def test_a_step_that_is_computed_again_is_taken_back_to_its_last_beginning():
    """Where a worker is lost during a step, the others change before they compute it again."""
    variable = tf.Variable(1.0)
    guard = SpikeGuard()
    guard._written = WrittenVariables(lambda: [variable])
    attempt = guard.before_attempts(variable.assign)
    attempt(5.0)
    variable.assign(2.0)  # as rows that are divided among other workers
    attempt(6.0)
    guard._written.take_back(guard._before)
    assert variable.numpy() == 2.0


@pytest.mark.parametrize("callback", [SpikeGuard(window=3), WeightComparison(7)])
def test_callbacks_can_be_pickled(callback):
    assert pickle.loads(pickle.dumps(callback)).get_state() == callback.get_state()
