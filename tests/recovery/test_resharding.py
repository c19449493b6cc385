"""Values of each replica, converted to another number of replicas."""

import functools
import itertools

import keras
import numpy as np
import pytest
from trainings import CLASSES, FEATURES, SPEC

from tfdist.compression import Policy
from tfdist.recovery.resharding import convert_micro_steps, group_by_variable, merge_ranks, reshard
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
INPUTS = np.random.default_rng(0).normal(size=(96, FEATURES)).astype("float32")
LABELS = np.arange(96) % CLASSES


def model(cpus, replicas, micro_steps=2, compression=None):
    policy = Policy(compression, dense_below=0)
    with MirroredStrategy(cpus[:replicas], compression=policy).scope():
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense
        made = keras.Sequential([keras.Input((FEATURES,)), dense(8, "tanh"), keras.layers.Dropout(0.0), dense(CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=micro_steps)
        made.compile(optimizer, loss=loss, metrics=["accuracy"])
    VariableSnapshots(TrainedModel(made)).build(SPEC)
    return made


def train(trained, first, end, rows=24):
    for start in range(first, end, rows):
        trained.train_on_batch(INPUTS[start : start + rows], LABELS[start : start + rows])


def restore(saved, new):
    variables = VariableSnapshots(TrainedModel(new))
    shared, per_replica, description = saved
    variables.check(shared, per_replica, description)
    variables.restore_shared(shared, description)
    variables.restore_per_replica(per_replica, description)
    variables.restore_metrics(per_replica, description)
    return group_by_variable(per_replica), group_by_variable(variables.per_replica())


def transfer(old, new):
    return restore(VariableSnapshots(TrainedModel(old)).snapshot(), new)


@pytest.mark.parametrize(
    ("old", "new"), [(3, 2), (1, 4), *(pytest.param(*pair, marks=pytest.mark.long) for pair in [(2, 3), (4, 1)])]
)
def test_sums_stay(cpus, old, new):
    models = [model(cpus, replicas, compression="powersgd:1") for replicas in (old, new)]
    train(models[0], 0, 72)
    before, after = transfer(*models)
    assert before.keys() == after.keys()
    for name, values in before.items():
        taken = [after[name][replica] for replica in range(new)]
        if name.startswith(("accumulators/", "metrics/")) or name.endswith("residual"):
            assert np.any(sum(values.values())), name
            # Numbers of about 1, added up in another order.
            np.testing.assert_allclose(sum(taken), sum(values.values()), atol=1e-6, err_msg=name)
        else:
            for value in taken:
                np.testing.assert_array_equal(value, values[0], name)
    results = [{name: float(value) for name, value in trained.get_metrics_result().items()} for trained in models]
    assert results[1] == pytest.approx(results[0], rel=1e-6)


@pytest.fixture(scope="module")
def half_done(cpus):
    """Trains 96 rows, two updates of 48; returns a snapshot after half of the second one, and the final weights."""

    @functools.cache
    def trained(replicas, micro_steps):
        undisturbed = model(cpus, replicas, micro_steps)
        train(undisturbed, 0, 72, 48 // micro_steps)
        saved = VariableSnapshots(TrainedModel(undisturbed)).snapshot()
        train(undisturbed, 72, 96, 48 // micro_steps)
        assert int(undisturbed.optimizer.iterations) == 2
        return saved, undisturbed.get_weights()

    return trained


@pytest.mark.parametrize(
    ("old", "new"), [((4, 2), (2, 4)), pytest.param((2, 4), (4, 2), marks=pytest.mark.long), ((4, 2), (2, 2))]
)
def test_an_update_that_is_half_done_is_completed(cpus, half_done, old, new):
    """From a number of replicas and of micro-steps per update to another one."""
    saved, expected = half_done(*old)
    resumed = model(cpus, *new)
    restore(saved, resumed)
    train(resumed, 72, 96, 48 // new[1])
    assert int(resumed.optimizer.iterations) == 2
    for value, same in zip(resumed.get_weights(), expected, strict=True):
        # Weights below 1: the order of sums.
        np.testing.assert_allclose(value, same, atol=1e-6)


def test_accumulators_that_one_side_lacks_are_left_out_or_empty(cpus):
    old, new = model(cpus, 2, 2), model(cpus, 2, None)
    train(old, 0, 72)  # one update and a micro-step
    _, after = transfer(old, new)
    assert int(new.optimizer.iterations.numpy()) == 1
    assert "accumulators/0/0" not in after
    train(old, 0, 24 * 2)
    _, after = transfer(new, old)
    assert int(old.optimizer.iterations) == 1
    assert not np.any(after["accumulators/0/0"][0])


def test_missing_shards_are_an_error(cpus):
    old, new = VariableSnapshots(TrainedModel(model(cpus, 2))), VariableSnapshots(TrainedModel(model(cpus, 3)))
    _, per_replica, description = old.snapshot()
    halves = [{name: value for name, value in per_replica.items() if name.endswith(f"@{rank}")} for rank in range(2)]
    with pytest.raises(ValueError, match=r"Received: 'accumulators/.*' of the replicas \[1\]. Expected: all 2"):
        new.restore_per_replica(halves[1], description)
    with pytest.raises(ValueError, match=r"of the replicas \[1\]. Expected: replica 0\. Pass the shard of this rank"):
        old.restore_per_replica(halves[1], description)
    new.restore_per_replica(merge_ranks(halves), description)
    with pytest.raises(ValueError, match="Two ranks saved the same replica. Received: '.*@1' of rank 2"):
        merge_ranks([*halves, halves[1]])


def test_a_common_value_stays_as_it_is_and_others_are_averaged():
    equal = {replica: np.array([0.1]) for replica in range(3)}  # 3 * 0.1 / 3 is not 0.1
    assert reshard(equal, "mean", 1, 2)[0] == 0.1
    other = {0: np.array([1.0], "float32"), 1: np.array([2.0], "float32")}
    assert reshard(other, "mean", 0, 1).tolist() == [1.5]
    assert reshard(other, "first", 0, 1).tolist() == [1.0]
    assert reshard(other, "sum", 2, 3).tolist() == [0.0]


def test_the_number_of_updates_stays():
    for old, new, done in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 8), range(9)):
        steps = convert_micro_steps(done, old, new)
        assert steps.micro_steps // new == done // old
        # The mean gradient so far is that of as many micro-steps as are counted.
        assert steps.factor * (done % old) == pytest.approx(steps.micro_steps % new)
        assert done % old or steps.factor == 1.0
