"""The modes' arguments, what does not work together with them, and one worker."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from local_models import compiled, fit
from testing.programs import Program
from testing.same_training import assert_same_training

from tfdist.local_updates import local_updates
from tfdist.local_updates.local_updates import LocalUpdates
from tfdist.recovery.trained_model import TrainedModel
from tfdist.recovery.variable_snapshots import VariableSnapshots
from tfdist.strategies import Asynchronous, DiLoCo, LocalSGD, MultiWorkerMirroredStrategy, Synchronous

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.mark.parametrize(
    ("mode", "arguments", "message"),
    [
        (LocalSGD, {"sync_every": 0}, "Invalid `sync_every`"),
        (LocalSGD, {"sync_every": 2.5}, "Invalid `sync_every`"),
        (DiLoCo, {"sync_every": True}, "Invalid `sync_every`"),
        (DiLoCo, {"sync_every": 4, "fragments": 5}, "Invalid `fragments`"),
        (DiLoCo, {"fragments": 0}, "Invalid `fragments`"),
        (DiLoCo, {"sync_every": 4, "overlap_steps": 4}, "Invalid `overlap_steps`"),
        (DiLoCo, {"overlap_steps": -1}, "Invalid `overlap_steps`"),
        (DiLoCo, {"mixing": 1.0}, "Invalid `mixing`"),
        (DiLoCo, {"mixing": float("nan")}, "Invalid `mixing`"),
        (DiLoCo, {"timeout_seconds": -1}, "Invalid `timeout_seconds`"),
    ],
)
def test_invalid_arguments_of_modes(mode, arguments, message):
    with pytest.raises(ValueError, match=message):
        mode(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": Asynchronous()}, "Invalid `mode`"),
        ({"mode": LocalSGD}, "Invalid `mode`"),
        (
            {"mode": LocalSGD(), "shard_optimizer_state": True},
            "`shard_weights` do not work with local updates",
        ),
        ({"mode": LocalSGD(), "load_balancing": True}, "`load_balancing` and `shares` do not work with local updates"),
        ({"mode": DiLoCo(), "shares": [1, 3]}, "`load_balancing` and `shares` do not work with local updates"),
    ],
)
def test_invalid_arguments_of_the_strategy(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiWorkerMirroredStrategy(**arguments)


def test_synchronous_is_the_default():
    assert MultiWorkerMirroredStrategy(mode=Synchronous()).local_updates is None
    assert MultiWorkerMirroredStrategy().local_updates is None


def sgd():
    return keras.optimizers.SGD(0.1)


def synchronized():
    return keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(synchronized=True)])


def float8():
    layer = keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((6,)), layer])
    layer.quantize("float8")
    return model


@pytest.mark.parametrize(
    ("mode", "build", "arguments", "message"),
    [
        (LocalSGD(), None, {"run_eagerly": True}, "Local updates run in functions"),
        (DiLoCo(fragments=5), None, {}, "more fragments than variables"),
        (DiLoCo(outer_optimizer=lambda: "adam"), None, {}, None),
        (DiLoCo(outer_optimizer=3), None, {}, "Invalid `outer_optimizer`"),
        (DiLoCo(outer_optimizer=lambda: keras.optimizers.SGD(use_ema=True)), None, {}, "Invalid `outer_optimizer`"),
        (LocalSGD(), synchronized, {}, "normalizes over the samples of all replicas"),
        (LocalSGD(), float8, {}, "a scale of float8"),
    ],
)
def test_what_cannot_be_right_is_an_error(mode, build, arguments, message):
    strategy = MultiWorkerMirroredStrategy(mode=mode)
    with strategy.scope():
        model = compiled(strategy, sgd) if build is None else build()
        model.compile(sgd(), loss="mse", **arguments)
    if message is None:
        fit(model, epochs=1)
        return
    with pytest.raises(ValueError, match=message):
        fit(model, epochs=1)


@pytest.mark.parametrize(
    "arguments", [pytest.param({}, marks=pytest.mark.long), {"micro_batches": 3}, {"compression": "int8"}]
)
def test_one_worker_trains_as_without_a_strategy(arguments):
    strategy = MultiWorkerMirroredStrategy(mode=LocalSGD(sync_every=2), **arguments)
    assert_same_training(strategy, Program(batch_size=12), 1e-6)  # w - (w - w') rounds


def test_assigned_weights_are_not_progress():
    strategy = MultiWorkerMirroredStrategy(mode=DiLoCo(sync_every=4))
    model = compiled(strategy, lambda: keras.optimizers.SGD(0.0))
    fit(model, epochs=1)
    model.set_weights([np.ones_like(value) for value in model.get_weights()])
    fit(model, epochs=1)
    assert all((value == 1).all() for value in model.get_weights())


def test_logs_are_the_means_of_the_workers_that_are_not_lost():
    values = np.array([[1, 2, 4], [0, 0, 0], [1, 4, 8]], np.float32)  # the second one is lost
    updates = object.__new__(LocalUpdates)
    updates._strategy_reference = lambda: SimpleNamespace(values_of_workers=lambda own: values)
    assert updates.mean_of_workers([2.0, 4.0]) == [3.0, 6.0]


def test_a_training_that_resumes_at_the_end_of_an_epoch_averages_its_statistics(monkeypatch):
    """It makes no step before, in which its model would be noted."""
    strategy = MultiWorkerMirroredStrategy(mode=LocalSGD(sync_every=4))
    model = compiled(strategy, sgd, normalizes=True)
    averaged = []
    monkeypatch.setattr(local_updates, "assign_means", lambda strategy, variables: averaged.extend(variables))
    VariableSnapshots(TrainedModel(model)).build((tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])))
    _, own = strategy.local_updates.saved_variables([model.optimizer])
    own["0/updates"].assign(3)
    strategy.synchronize()
    normalization = model.layers[1]
    assert {id(one) for one in averaged} == {id(normalization.moving_mean), id(normalization.moving_variance)}
