"""Weights of replicas are compared by hashes: who differs from the majority is named; otherwise nobody knows."""

import logging
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from fake_strategy import FakeServers, FakeStrategy
from flipped_bits import flip_bit
from launched_runs import launch
from stock_strategy import stock_mirrored

from tfdist.callbacks import FailureRecovery, WeightComparison
from tfdist.callbacks.replica_votes import Verdict, vote
from tfdist.callbacks.weight_comparison import DifferentWeightsError
from tfdist.callbacks.weight_hashes import hash_variables
from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
ROWS = np.random.default_rng(0).normal(size=(96, 3)).astype("float32")
TARGETS = ROWS.sum(axis=1, keepdims=True)


class Flip(keras.callbacks.Callback):
    """Flips a bit of a variable on one device after a step."""

    def __init__(self, step, device, find=lambda model: model.trainable_variables[0]):
        super().__init__()
        self._step, self._device, self._find = step, device, find

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self._step:
            flip_bit(self.model.distribute_strategy, self._find(self.model), self._device)


def fit(devices, *callbacks, **options):
    with MirroredStrategy(devices).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model.fit(ROWS, TARGETS, batch_size=6, verbose=0, callbacks=[*callbacks])


@pytest.mark.parametrize(
    ("hashes", "verdict"),
    [
        ({}, Verdict(None)),
        ({(0, 0): 4}, Verdict(4)),
        ({(0, 0): 4, (1, 0): 4}, Verdict(4)),
        ({(0, 0): 4, (1, 0): 4, (2, 1): 5}, Verdict(4, ((2, 1),))),
        ({(0, 0): 4, (0, 1): 4, (1, 0): 5, (1, 1): 5}, Verdict(None, ((0, 0), (0, 1), (1, 0), (1, 1)))),
        ({(0, 0): 4, (1, 0): 5, (2, 0): 6}, Verdict(None, ((0, 0), (1, 0), (2, 0)))),
    ],
)
def test_more_than_half_of_the_replicas_are_right(hashes, verdict):
    assert vote(hashes) == verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn"])
def test_a_hash_is_that_of_the_bytes(dtype):
    values = tf.cast(tf.cast([0.0, 1.0, 1.0], tf.float32), dtype)
    variables = [tf.Variable(values), tf.Variable(values), tf.Variable(values[::-1]), tf.Variable(values[1])]
    one, same, other, scalar = hash_variables(variables)
    assert one == same
    assert len({int(one), int(other), int(scalar)}) == 3


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(more, marks=pytest.mark.long) for more in ({"steps_per_execution": 3}, {"run_eagerly": True}))],
)
def test_a_flipped_bit_is_found_within_the_interval_and_named(cpus, options):
    comparison = WeightComparison(every_steps=4)
    with pytest.raises(DifferentWeightsError, match="worker 0, device 2: sequential.*/kernel; of 3 replicas") as raised:
        fit(cpus[:3], Flip(6, 2), comparison, **options)
    assert raised.value.ranks == (0,)
    several = "steps_per_execution" in options
    assert f"after step {6 if several else 8}." in str(raised.value)
    assert comparison.comparisons == (1 if several else 2)


@pytest.mark.parametrize(
    "find",
    [
        lambda model: model.optimizer.variables[3],
        pytest.param(lambda model: model.trainable_variables[-1], marks=pytest.mark.long),
    ],
)
def test_slots_and_every_weight_are_compared(cpus, find):
    with pytest.raises(DifferentWeightsError, match="other weights than the majority"):
        fit(cpus[:3], Flip(1, 0, find), WeightComparison(every_steps=1))


def test_of_two_nobody_knows_who_is_right(cpus):
    with pytest.raises(DifferentWeightsError, match="nobody knows which are right. .* different: sequential"):
        fit(cpus[:2], Flip(2, 1), WeightComparison(every_steps=2))


def test_equal_replicas_pass_and_one_device_has_nothing_to_compare(cpus):
    compared, alone = WeightComparison(every_steps=5), WeightComparison(every_steps=5)
    fit(cpus[:2], compared)
    fit(cpus[:1], alone)
    assert (compared.comparisons, alone.comparisons) == (3, 0)


def test_no_checkpoint_has_other_weights(cpus, tmp_path):
    recovery = FailureRecovery(tmp_path, every_steps=4)
    with pytest.raises(DifferentWeightsError, match="after step 4"):
        fit(cpus[:3], Flip(3, 0), WeightComparison(every_steps=1000), recovery)
    assert recovery.saves == 0


@pytest.mark.long
def test_a_restarted_training_compares_after_the_same_steps(cpus, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(cpus[:2], WeightComparison(7), FailureRecovery(tmp_path, every_steps=5, background=False), Stop())
    comparison = WeightComparison(7)
    fit(cpus[:2], comparison, FailureRecovery(tmp_path))
    assert comparison.comparisons == 3  # after steps 7 and 14, and before the last save


class Workers(FakeStrategy):
    """Three workers, of which this one has the rank `rank`; `wrong` have other bits."""

    num_workers, replicas_of_workers, may_lose_workers, has_left, extended = 3, (1, 1, 1), True, False, None
    wrong: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    exchanges = 0

    def values_of_workers(self, values):
        """The values of workers with the same bits, except those that are wrong."""
        self.exchanges += 1
        rows = np.stack([values] * self.num_workers)
        rows[:, 1:] = 7
        for rank in self.wrong:
            rows[rank, 1:] = 100 + rank
        for rank in self.missing:
            rows[rank] = 0
        return rows

    def leave_others(self):
        """Is called by a worker with other bits."""
        self.has_left = True


def compare(monkeypatch, **attributes):
    """Lets a worker compare; it has the bits 7, or others if it is wrong."""
    from tfdist.callbacks import weight_comparison

    strategy = Workers(**attributes)
    own = 100 + strategy.rank if strategy.rank in strategy.wrong or attributes.get("replays_wrong") else 7
    monkeypatch.setattr(weight_comparison, "common_variables", lambda model: {"0: kernel": [None]})
    monkeypatch.setattr(weight_comparison, "hash_variables", lambda variables: np.array([own]))
    monkeypatch.setattr(weight_comparison, "hash_all", lambda row: int(row[0]))
    comparison = WeightComparison()
    comparison.set_model(SimpleNamespace(distribute_strategy=strategy))
    comparison.on_train_begin()
    try:
        comparison.compare()
    except DifferentWeightsError as error:
        return strategy, error
    return strategy, None


def test_a_worker_with_other_bits_leaves_the_others(monkeypatch):
    strategy, error = compare(monkeypatch, rank=1, wrong=(1,))
    assert strategy.has_left and error.ranks == (1,)
    assert "worker 1: kernel; of 3 replicas" in str(error) and "Start this worker again" in str(error)


def test_the_others_log_who_leaves_and_train_on(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        strategy, error = compare(monkeypatch, rank=0, wrong=(1,))
    assert error is None and not strategy.has_left
    assert "worker 1: kernel; of 3 replicas" in caplog.text and "These workers leave" in caplog.text


def test_two_that_are_left_have_no_majority(monkeypatch):
    strategy, error = compare(monkeypatch, rank=0, wrong=(1,), missing=(2,))
    assert "nobody knows which are right" in str(error) and error.ranks == (0, 1) and not strategy.has_left


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_worker_that_repeats_steps_compares_with_those_that_vote(monkeypatch, is_wrong):
    strategy, error = compare(monkeypatch, rank=2, missing=(2,), replays_wrong=is_wrong)
    assert strategy.has_left == is_wrong
    assert (error is not None) == is_wrong
    assert strategy.exchanges == 1, "the others have made no further one"
    if is_wrong:
        assert "worker 2, which joins: any of 1 variables; of 2 replicas" in str(error)


def test_a_worker_that_repeats_steps_repeats_how_others_name_one(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        strategy, error = compare(
            monkeypatch, rank=2, num_workers=4, replicas_of_workers=(1,) * 4, missing=(2,), wrong=(1,)
        )
    assert error is None and strategy.exchanges == 2
    assert "worker 1: kernel; of 3 replicas" in caplog.text


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (lambda cpus: MirroredStrategy(cpus[:2], shard_optimizer_state=True), "hold different parts of the optimizer"),
        (lambda cpus: FakeStrategy(local_updates=object(), extended=None), "train by themselves"),
        (lambda cpus: FakeServers(), "on servers, once each"),
        (lambda cpus: stock_mirrored(cpus[:2]), "MirroredStrategy, whose replicas may differ"),
    ],
)
def test_replicas_that_differ_on_purpose_are_refused(cpus, strategy, reason):
    comparison = WeightComparison()
    comparison.set_model(SimpleNamespace(distribute_strategy=strategy(cpus)))
    with pytest.raises(ValueError, match=f"WeightComparison needs replicas .* Received: .*{reason}"):
        comparison.on_train_begin()


def test_an_interval_is_a_number_of_steps():
    with pytest.raises(ValueError, match="Invalid `every_steps`"):
        WeightComparison(0)


def test_a_cluster_of_one_worker_gathers_its_own_values():
    values = np.arange(3)
    np.testing.assert_array_equal(MultiWorkerMirroredStrategy().values_of_workers(values), [values])


@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.parametrize("options", [[], ["--elastic", "1"]])
def test_no_false_alarm_in_10_000_steps(tmp_path, options):
    script = Path(__file__).with_name("on_workers_compared.py")
    run = launch(tmp_path, script, options=["--workers", "3", *options]).assert_complete()
    assert "than the majority" not in run.output, run.output[-3000:]
    assert [run.path(f"comparisons-{rank}").read_text() for rank in range(3)] == ["1000"] * 3
