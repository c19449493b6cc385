"""What each replica has for itself, taken over by another number of replicas."""

import itertools

import keras
import numpy as np
import pytest
from trainings import CLASSES, FEATURES, SPEC

from tfdist.compression import Policy
from tfdist.recovery.micro_steps import converted
from tfdist.recovery.replicas import by_name, merge, share
from tfdist.recovery.variables import TrainingVariables
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
    TrainingVariables(made).build(SPEC)
    return made


def train(trained, first, end, rows=24):
    for start in range(first, end, rows):
        trained.train_on_batch(INPUTS[start : start + rows], LABELS[start : start + rows])


def handed_on(old, new):
    old_variables, variables = TrainingVariables(old), TrainingVariables(new)
    shared, own, description = old_variables.shared(), old_variables.own(), old_variables.description()
    variables.check(shared, own, description)
    variables.restore_shared(shared, description)
    variables.restore_own(own, description)
    variables.restore_metrics(own, description)
    return by_name(own), by_name(variables.own())


@pytest.mark.parametrize(("old", "new"), [(2, 3), (4, 1), (3, 2), (1, 4)])
def test_sums_stay(cpus, old, new):
    models = [model(cpus, replicas, compression="powersgd:1") for replicas in (old, new)]
    train(models[0], 0, 72)
    before, after = handed_on(*models)
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


@pytest.mark.parametrize(("replicas", "micro_steps"), [((4, 2), (2, 4)), ((2, 4), (4, 2)), ((4, 2), (2, 2))])
def test_an_update_that_is_half_done_is_completed(cpus, replicas, micro_steps):
    """An update is of 48 rows: half of the second one on some replicas, the other half on others."""
    undisturbed, old = (model(cpus, replicas[0], micro_steps[0]) for _ in range(2))
    new = model(cpus, replicas[1], micro_steps[1])
    rows = [48 // number for number in micro_steps]
    train(undisturbed, 0, 96, rows[0])
    train(old, 0, 72, rows[0])
    handed_on(old, new)
    train(new, 72, 96, rows[1])
    assert int(new.optimizer.iterations) == int(undisturbed.optimizer.iterations) == 2
    for value, expected in zip(new.get_weights(), undisturbed.get_weights(), strict=True):
        # Weights below 1: the order of sums.
        np.testing.assert_allclose(value, expected, atol=1e-6)


def test_accumulators_that_one_side_lacks_are_left_out_or_empty(cpus):
    old, new = model(cpus, 2, 2), model(cpus, 2, None)
    train(old, 0, 72)  # one update and a micro-step
    _, after = handed_on(old, new)
    assert int(new.optimizer.iterations.numpy()) == 1
    assert "accumulators/0/0" not in after
    train(old, 0, 24 * 2)
    _, after = handed_on(new, old)
    assert int(old.optimizer.iterations) == 1
    assert not np.any(after["accumulators/0/0"][0])


def test_shards_of_all_ranks_are_asked_for(cpus):
    old, new = TrainingVariables(model(cpus, 2)), TrainingVariables(model(cpus, 3))
    own, description = old.own(), old.description()
    halves = [{name: value for name, value in own.items() if name.endswith(f"@{rank}")} for rank in range(2)]
    with pytest.raises(ValueError, match=r"Received: 'accumulators/.*' of the replicas \[1\]. Expected: of all 2"):
        new.restore_own(halves[1], description)
    with pytest.raises(ValueError, match=r"of the replicas \[1\]. Expected: of replica 0\. Give this rank's own"):
        old.restore_own(halves[1], description)
    new.restore_own(merge(halves), description)
    with pytest.raises(ValueError, match="Two ranks have saved the same replica. Received: '.*@1' of rank 2"):
        merge([*halves, halves[1]])


def test_a_common_value_stays_as_it_is_and_others_are_averaged():
    equal = {replica: np.array([0.1]) for replica in range(3)}  # 3 * 0.1 / 3 is not 0.1
    assert share(equal, "mean", 1, 2)[0] == 0.1
    other = {0: np.array([1.0], "float32"), 1: np.array([2.0], "float32")}
    assert share(other, "mean", 0, 1).tolist() == [1.5]
    assert share(other, "first", 0, 1).tolist() == [1.0]
    assert share(other, "sum", 2, 3).tolist() == [0.0]


def test_the_number_of_updates_stays():
    for old, new, done in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 8), range(9)):
        steps = converted(done, old, new)
        assert steps.done // new == done // old
        # The mean gradient so far is that of as many micro-steps as are counted.
        assert steps.factor * (done % old) == pytest.approx(steps.done % new)
        assert done % old or steps.factor == 1.0
