"""What an accumulation keeps, computes again, and leaves as it is."""

import functools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.elastic.elastic_accumulation import Accumulators, ElasticAccumulation
from tfdist.elastic.received_state import ReceivedState
from tfdist.elastic.step_transactions import Changes, WrittenVariables
from tfdist.exchange.exchange_errors import ExchangeError
from tfdist.membership.decisions import NO_VIEW, View
from tfdist.strategies import MultiWorkerMirroredStrategy
from tfdist.strategies.elastic_training import ElasticTraining
from tfdist.training.metric_totals import MetricTotals

pytestmark = pytest.mark.usefixtures("cpus")

_STEPS = 3  # of an accumulation
_BOTH, _LEFT = View((1, 0), (0, 1)), View((2, 0), (0,))


class _Transactions:
    """Steps of a worker that trains with another one, which may be lost."""

    def __init__(self):
        self.view, self.trains, self.is_alone, self.may_join = _BOTH, True, False, True
        self.changes, self.failures = Changes(), 0
        self.group = SimpleNamespace(addresses=["a", "b"], log=SimpleNamespace(take=lambda: None))

    def run(self, step, written):
        while True:
            before = written.read()
            result = step()
            if not self.failures:
                return result
            self.failures -= 1
            written.take_back(before)

    def compute_again(self, step):
        step()

    def numbers_with(self, *conditions):
        return [int(condition) for condition in conditions]


class _Training:
    """A model of one weight, whose step adds the batch times the weight and the rows of this worker to the sums."""

    def __init__(self):
        self.weight, self.rate, self.count = tf.Variable(2.0), tf.Variable(1.0), tf.Variable(0)
        self.sums, self.shares = tf.Variable([0.0, 0.0]), tf.Variable(1.0)
        self.transactions = _Transactions()
        self.accumulation = ElasticAccumulation(
            self.transactions, lambda: {0: (int(self.count.numpy()), _STEPS)}, shares=self.shares
        )
        others = [self.weight, self.rate, self.count, self.shares]
        self.accumulation.use(WrittenVariables(lambda: others), Accumulators(lambda: [self.sums]))

    def step(self, batch):
        def step():
            self.sums.assign_add([batch * self.weight * self.shares, 1.0])
            self.count.assign_add(1)

        self.accumulation.run(step)

    def lose_the_other(self):
        self.transactions.view = _LEFT
        self.shares.assign(2.0)  # this worker takes over its rows


def test_the_earlier_steps_are_computed_again_with_the_shares_and_the_weights_of_their_time():
    training = _Training()
    training.step(10.0)
    training.weight.assign(3.0)  # by another optimizer, or a callback
    training.step(1.0)
    assert training.sums.numpy().tolist() == [23.0, 2.0]
    training.rate.assign(0.5)  # by a callback
    training.weight.assign(5.0)
    training.lose_the_other()
    training.step(100.0)
    assert training.sums.numpy().tolist() == [2 * (10 * 2 + 1 * 3 + 100 * 5), 3.0]
    assert (training.weight.numpy(), training.rate.numpy(), training.count.numpy()) == (5.0, 0.5, 3)
    assert training.transactions.changes.repeated_steps == 2
    assert training.shares.numpy() == 2.0


def test_what_was_computed_again_counts_only_with_the_present_step():
    training = _Training()
    training.step(10.0)
    training.lose_the_other()
    training.transactions.failures = 2
    training.step(1.0)
    assert training.sums.numpy().tolist() == [2 * 2 * 11, 2.0]
    assert training.transactions.changes.repeated_steps == 1
    training.step(1.0)
    assert training.transactions.changes.repeated_steps == 1, "the sums are complete"


def test_a_loss_between_two_accumulations_and_a_worker_that_joins_cost_nothing():
    training = _Training()
    for _ in range(_STEPS):
        training.step(1.0)
    training.sums.assign([0.0, 0.0])
    training.transactions.view = _LEFT
    training.step(1.0)
    training.transactions.view = View((3, 0), (0, 3))
    training.step(1.0)
    assert training.sums.numpy().tolist() == [4.0, 2.0]
    assert training.transactions.changes == Changes()


def test_a_worker_that_repeats_steps_may_join_once_it_has_the_beginning_of_an_accumulation():
    training = _Training()
    training.count.assign(_STEPS + 1)  # the state of another worker
    training.transactions.trains = False
    training.accumulation.has_state_of_another()
    allowed = [training.transactions.may_join]
    for _ in range(_STEPS):
        training.step(0.0)
        allowed.append(training.transactions.may_join)
    assert allowed == [False, False, False, True]
    training.transactions.trains = True
    training.lose_the_other()
    training.step(1.0)  # it knows nobody who has sums
    assert training.transactions.changes.repeated_steps == 1


def test_sums_of_a_worker_that_has_trained_by_itself_are_computed_again():
    """It has added up all rows, and trains with others afterwards."""
    training = _Training()
    training.transactions.trains, training.transactions.is_alone = False, True
    training.step(1.0)
    training.transactions.trains, training.transactions.is_alone = True, False
    training.shares.assign(0.5)
    training.step(1.0)
    assert training.sums.numpy().tolist() == [2.0, 2.0]


def _trained(losses):
    """Trains a model in a process that loses another one, which had no rows, before the steps of these numbers."""
    keras.utils.set_random_seed(3)
    layers = keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1, gradient_accumulation_steps=3), "mse", metrics=["mae"], run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    training, transactions = object.__new__(ElasticTraining), _Transactions()
    strategy = SimpleNamespace(
        row_shares=SimpleNamespace(state=tf.Variable(1.0)),
        compression_state=SimpleNamespace(variables=[]),
        metric_totals=MetricTotals(),
        local_updates=None,
    )
    strategy.written_variables = functools.partial(MultiWorkerMirroredStrategy.written_variables, strategy)
    vars(training).update(
        _transactions=transactions,
        _row_shares=strategy.row_shares,
        _strategy=lambda: strategy,
        metric_totals=strategy.metric_totals,
    )
    model.make_train_function()
    train = model.train_function
    function = training.step_function(model, "train", lambda batch: train(iter([batch])))
    batches = np.random.default_rng(0).normal(size=(7, 5, 4)).astype(np.float32)
    for number, rows in enumerate(batches):
        if number == 4:
            model.optimizer.learning_rate = 0.05
            function = training.step_function(model, "train", lambda batch: train(iter([batch])))
        if number in losses:
            transactions.view = View((number + 2, 0), (0, number + 2))
            transactions.failures = 1
        function((rows[:, :3], rows[:, 3:]))
        assert training._view_of_sums(model) == (transactions.view if (number + 1) % 3 else None)
    training.run_update(model, lambda: model.optimizer._iterations.assign_add(2))
    values = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [value.numpy() for value in values], transactions.changes.repeated_steps


def test_a_model_ends_with_the_bits_of_one_whose_steps_were_computed_once():
    expected, repeated = _trained(())
    assert repeated == 0
    values, repeated = _trained((2, 4, 5))
    assert repeated == 2 + 1 + 2
    for value, expected_value in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, expected_value)


def test_the_workers_that_have_the_sums_are_those_of_the_last_training_step():
    training = _Training()
    seen = [training.accumulation.view_of_sums]
    for _ in range(_STEPS):
        training.step(1.0)
        seen.append(training.accumulation.view_of_sums)
    assert seen == [None, _BOTH, _BOTH, None]
    training.step(1.0)
    training.lose_the_other()  # noticed in a step that is no training step
    assert training.accumulation.view_of_sums == _BOTH
    training.step(1.0)
    assert training.accumulation.view_of_sums == _LEFT
    training.count.assign(1)  # a checkpoint within an accumulation
    assert training.accumulation.view_of_sums == NO_VIEW


def test_steps_that_the_program_takes_back_are_not_computed_again():
    training = _Training()
    for _ in range(_STEPS + 1):
        training.step(1.0)
    training.count.assign(1)  # a checkpoint of the first accumulation
    training.lose_the_other()
    with pytest.raises(ExchangeError, match="that had begun before this training"):
        training.step(1.0)


def test_a_worker_that_joins_begins_without_sums():
    state = object.__new__(ReceivedState)
    values = {"accumulators/0/0@0": np.ones(2), "state/1.Own/0@0": np.ones(2)}
    state._shards = [None, SimpleNamespace(tensors=values, metadata={})]
    tensors = state.read_rank(1).tensors
    assert tensors["accumulators/0/0@1"].tolist() == [0.0, 0.0]
    assert tensors["state/1.Own/0@1"].tolist() == [1.0, 1.0]
