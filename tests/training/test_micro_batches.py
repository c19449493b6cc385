"""Micro-batches in one process: equality with the complete batch, order of computation, rejected steps."""

import added_loss_cases  # noqa: F401
import custom_step_cases  # noqa: F401
import data_cases  # noqa: F401
import keras
import loss_cases  # noqa: F401
import metric_cases  # noqa: F401
import model_cases  # noqa: F401
import numpy as np
import optimizer_cases  # noqa: F401
import pytest
import tensorflow as tf
from cases import CASES
from comparison import TOLERANCE, largest_difference
from one_process import in_one_process
from testing.data import NUMBERS
from testing.programs import Program
from testing.same_training import assert_same_training

from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")

INPUTS = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


def in_parts(cpus, count):
    """A strategy of one replica with micro-batches; one of workers would have all logical devices."""

    class InParts(MirroredStrategy):
        micro_batches = count

    return InParts(cpus[:1])


# Cases that depend on how a step is computed; tests/parity and tests/any_strategy have the others.
_CASES = """
added_losses accumulation_with_clipping_ema_decay_and_schedule custom_train_step masked_sequences
mean_with_sample_weight synchronized_batch_normalization
""".split()
_LONG = """
class_weights compute_loss_of_the_users_own constraints convolutions_without_samples endpoint_layers float8
generative_adversarial_networks last_batch_of_one_sample lookups_without_samples loss_function_that_averages
loss_scale_overflow_in_an_accumulation loss_scale_overflow_on_one_replica many_inputs_and_outputs on_batch_methods
own_losses_and_logs regularizers run_eagerly_without_samples sample_weights seeded_shuffle_and_cache sum_reduction texts
two_optimizers_in_a_step
""".split()


@pytest.mark.parametrize("name", [*_CASES, *(pytest.param(name, marks=pytest.mark.long) for name in _LONG)])
def test_micro_batches_equal_the_whole_batch(cpus, name):
    case = CASES[name]
    outcome = case.run(in_parts(cpus, 2))
    if case.reference_is_traced:
        alone = case.reference(tf.distribute.get_strategy())
    else:
        alone = in_one_process(case.reference)
    assert largest_difference(outcome, alone) <= TOLERANCE


@pytest.mark.parametrize("rows", [*(pytest.param(rows, marks=pytest.mark.long) for rows in (16, 5)), 2])
def test_parts_that_differ_in_size_and_parts_without_rows(cpus, rows):
    assert_same_training(
        in_parts(cpus, 3), Program(data=NUMBERS.first(rows), batch_size=16, epochs=3, compile={"metrics": ["mae"]})
    )


def compiled(strategy, layers=(), **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], **arguments)
    return model


class Marked(keras.layers.Layer):
    """Gives the operations of the forward and of the backward pass a name."""

    def call(self, inputs):
        @tf.custom_gradient
        def marked(values):
            return tf.identity(values, name="going_forward"), lambda up: tf.identity(up, name="going_back")

        return marked(inputs)


def graph_of(strategy, model):
    model.fit(INPUTS, TARGETS, verbose=0)  # makes the variables of the metrics
    data = tf.constant(INPUTS), tf.constant(TARGETS)
    step = tf.function(lambda: strategy.run(model.train_step, args=(data,)), autograph=False)
    return step.get_concrete_function().graph


def comes_before(first, second):
    """Whether `second` waits for `first`."""
    waiting, seen = [second], set()
    while waiting:
        operation = waiting.pop()
        if operation is first:
            return True
        if operation not in seen:
            seen.add(operation)
            waiting += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    return False


def test_a_micro_batch_begins_when_the_one_before_has_its_gradients(cpus):
    strategy = in_parts(cpus, 3)
    operations = graph_of(strategy, compiled(strategy, [Marked()])).get_operations()
    forward = [operation for operation in operations if "going_forward" in operation.name]
    back = [operation for operation in operations if "going_back" in operation.name]
    assert (len(forward), len(back)) == (3, 3)
    for part in range(2):
        assert comes_before(back[part], forward[part + 1])
    assert not comes_before(back[2], forward[1])


@pytest.mark.parametrize(("full", "workers", "expected"), [("4", 2, 2), ("4", 1, 4), ("3", 2, 1), ("2", 2, 1)])
def test_as_many_as_make_up_for_missing_workers(monkeypatch, full, workers, expected):
    from tfdist.strategies.worker_start import default_micro_batches

    monkeypatch.setenv("TFDIST_FULL_WORKERS", full)
    assert default_micro_batches(workers) == expected
    monkeypatch.delenv("TFDIST_FULL_WORKERS")
    assert default_micro_batches(workers) == 1


def test_a_strategy_of_local_devices_has_one(cpus):
    assert MirroredStrategy(cpus[:2]).micro_batches == 1


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "2"])
def test_a_number_of_micro_batches_is_positive(value):
    with pytest.raises(ValueError, match="Invalid `micro_batches`. Received: "):
        MultiWorkerMirroredStrategy(micro_batches=value)


def test_a_reduction_in_a_condition_is_rejected_with_the_remedy(cpus):
    class InACondition(keras.layers.Layer):
        def call(self, inputs):
            if tf.distribute.in_cross_replica_context() or not tf.is_tensor(inputs):
                return inputs
            context = tf.distribute.get_replica_context()
            return tf.cond(
                tf.shape(inputs)[1] > 0,
                lambda: context.all_reduce("SUM", tf.stop_gradient(inputs)) * 0.0 + inputs,
                lambda: inputs,
            )

    with pytest.raises(Exception, match="`micro_batches=1`"):
        strategy = in_parts(cpus, 2)
        graph_of(strategy, compiled(strategy, [InACondition()]))


def test_an_error_of_a_step_comes_out_as_it_is(cpus):
    class Failing(keras.layers.Layer):
        def call(self, inputs):
            if tf.distribute.in_cross_replica_context() or not isinstance(inputs, tf.Tensor):
                return inputs
            raise KeyError("of the custom layer")

    with pytest.raises(Exception, match="of the custom layer"):
        compiled(in_parts(cpus, 2), [Failing()]).fit(INPUTS, TARGETS, verbose=0)
