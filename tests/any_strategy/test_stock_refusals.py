"""What TensorFlow's own strategies cannot do is said at once, with the remedy; what is not tried on TPUs, once."""

import inspect
import json
import logging
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_strategy import FakeTPUStrategy, stock_mirrored

from tfdist.callbacks import CommunicationReport, FailureRecovery, GradientAccumulation, WorkerReport, other_strategies
from tfdist.callbacks.other_strategies import described, replacement_of
from tfdist.recovery.host_copies import HostCopies
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
BATCH = np.ones([4, 3], "float32"), np.ones([4, 1], "float32")


def compiled(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    return model


def begin(callback, strategy):
    """Calls what `fit` calls first."""
    callback.set_model(SimpleNamespace(distribute_strategy=strategy))
    callback.on_train_begin()


def of_class(kind, **attributes):
    """An object of exactly that class, though there is no cluster for it."""
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


@pytest.fixture
def two_workers(monkeypatch):
    """TensorFlow's strategy of several workers, which has found one when it was made, and is told of two after that."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    monkeypatch.setattr(type(strategy), "cluster_resolver", resolver)
    return strategy


@pytest.mark.parametrize(
    "make",
    [lambda: GradientAccumulation(2), CommunicationReport, lambda: FailureRecovery("no")],
    ids=["accumulation", "report", "recovery"],
)
def test_several_workers_are_refused_before_keras_fails(two_workers, monkeypatch, make):
    trainer = next(kind for kind in keras.Model.__mro__ if "_maybe_symbolic_build" in vars(kind))
    monkeypatch.setattr(trainer, "_maybe_symbolic_build", inspect.unwrap(trainer._maybe_symbolic_build))
    model = compiled(two_workers)
    with pytest.raises(
        ValueError,
        match=r"Keras 3 cannot train .*made under tf.distribute's MultiWorkerMirroredStrategy with several workers\. "
        r"Expected: `tfdist.strategies.MultiWorkerMirroredStrategy`",
    ):
        model.fit(*BATCH, verbose=0, callbacks=[make()])
    assert not model.optimizer.built


def test_someone_elses_repaired_strategy_is_not_refused(two_workers):
    GradientAccumulation(2)
    two_workers.__class__ = type("Repaired", (tf.distribute.MultiWorkerMirroredStrategy,), {})
    compiled(two_workers).fit(*BATCH, verbose=0)


def test_evaluating_and_predicting_are_not_in_the_way():
    GradientAccumulation(2)
    model = compiled(tf.distribute.MultiWorkerMirroredStrategy())
    model.fit(*BATCH, verbose=0)
    assert model.evaluate(*BATCH, verbose=0) >= 0 and model.predict(BATCH[0], verbose=0).shape == (4, 1)


def test_parameter_servers_are_refused():
    servers = of_class(tf.distribute.ParameterServerStrategy)
    with pytest.raises(ValueError, match=r"ParameterServerStrategy\. Expected: `tfdist.strategies.ParameterServerStr"):
        other_strategies._refuse_what_keras_cannot(servers)
    with pytest.raises(ValueError, match=r"workers of this strategy.*Expected: `tfdist.strategies.ParameterServerStra"):
        begin(FailureRecovery("no"), servers)


def test_recovery_does_not_guess_the_workers(two_workers):
    with pytest.raises(ValueError, match=r"workers of this strategy.*Expected: `tfdist.strategies.MultiWorkerMirrored"):
        begin(FailureRecovery("no"), two_workers)


def test_accumulation_needs_variables_of_each_replica(cpus):
    model = compiled(tf.distribute.experimental.CentralStorageStrategy(cpus[:2]))
    with pytest.raises(ValueError, match=r"CentralStorageStrategy\..*Make the model under `tfdist.strategies.Mirrored"):
        model.fit(*BATCH, verbose=0, callbacks=[GradientAccumulation(2)])
    assert int(model.optimizer.iterations) == 0


def test_what_is_not_counted_is_not_reported(cpus):
    with pytest.raises(ValueError, match=r"tf.distribute's MirroredStrategy with 2 replicas.*`tfdist.strategies.Mirr"):
        begin(CommunicationReport(), stock_mirrored(cpus[:2]))
    tpus = type("Two", (FakeTPUStrategy,), {"num_replicas_in_sync": 2})()
    with pytest.raises(ValueError, match=r"tf.distribute's TPUStrategy with 2 .*Leave CommunicationReport out\.$"):
        begin(CommunicationReport(), tpus)


def test_strategies_are_called_by_their_public_names(cpus):
    assert described(tf.distribute.get_strategy()) == "no strategy"
    assert described(tf.distribute.OneDeviceStrategy("/cpu:0")) == "tf.distribute's OneDeviceStrategy"
    assert described(of_class(tf.distribute.experimental.TPUStrategy)) == "tf.distribute's TPUStrategy"
    assert described(of_class(tf.distribute.ParameterServerStrategy)) == "tf.distribute's ParameterServerStrategy"
    assert described(MirroredStrategy(cpus[:2])) == "tfdist's MirroredStrategy"
    assert replacement_of(FakeTPUStrategy()) is replacement_of(tf.distribute.OneDeviceStrategy("/cpu:0")) is None
    with pytest.raises(ValueError, match=r"Received: a model made under no strategy\. Expected: `tfdist.strategies.Pa"):
        begin(WorkerReport(), tf.distribute.get_strategy())


def test_what_is_not_tried_on_tpus_is_told_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(other_strategies, "_has_told_of_tpus", False)
    caplog.set_level(logging.INFO, "tfdist")
    for make in (lambda: tf.distribute.OneDeviceStrategy("/cpu:0"), FakeTPUStrategy, FakeTPUStrategy):
        callbacks = [GradientAccumulation(1), FailureRecovery(tmp_path / make.__name__)]
        compiled(make()).fit(*BATCH, verbose=0, callbacks=callbacks)
    (told,) = [record for record in caplog.records if "TPU" in record.getMessage()]
    assert told.name == "tfdist" and told.levelno == logging.WARNING
    assert "have not been tried on TPUs" in told.getMessage() and "docs/any_strategy.md" in told.getMessage()


def test_recovery_alone_tells_it_too(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(other_strategies, "_has_told_of_tpus", False)
    compiled(FakeTPUStrategy()).fit(*BATCH, verbose=0, callbacks=[FailureRecovery(tmp_path)])
    assert "have not been tried on TPUs" in caplog.text


def test_the_memory_of_other_devices_is_not_looked_into():
    """A TPU's or GPU's value is asked for its copy on the host; only a CPU's lies where NumPy can see it."""

    class OnTPU(bytearray):
        device = "/job:worker/replica:0/task:0/device:TPU:0"

        def numpy(self):
            return np.arange(3.0)

    copies = HostCopies()
    for _ in range(2):
        copy = copies.of("kernel", SimpleNamespace(read_value=OnTPU))
        copies.finish()
        np.testing.assert_array_equal(copy, [0.0, 1.0, 2.0])


def test_bfloat16_is_copied_all_the_same():
    copies = HostCopies()
    copy = copies.of("kernel", tf.Variable([1.5, 2.0], dtype=tf.bfloat16))
    copies.finish()
    assert copy.dtype == tf.bfloat16.as_numpy_dtype and copy.tolist() == [1.5, 2.0]
