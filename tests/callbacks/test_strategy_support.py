"""Callbacks under TensorFlow's own strategies: errors with the remedy, and one warning on TPUs."""

import json
import logging
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_strategy import FakeTPUStrategy, stock_mirrored

from tfdist.callbacks import (
    CommunicationReport,
    FailureRecovery,
    GradientAccumulation,
    TrainingMonitor,
    WorkerReport,
    strategy_support,
)
from tfdist.patches import replacements
from tfdist.recovery.variable_copies import HostCopies
from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals import python_function_results
from tfdist.training.strategy_kinds import describe_strategy, suggested_replacement

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
    """An object of exactly that class, without a cluster."""
    created = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(created, name, value)
    return created


@pytest.fixture
def two_workers(monkeypatch):
    """TensorFlow's strategy of several workers; its resolver reports two workers after its creation."""
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
def test_several_workers_are_rejected_before_keras_fails(unpatched, two_workers, make):
    model = compiled(two_workers)
    with pytest.raises(
        ValueError,
        match=r"Keras 3 cannot train .*under tf.distribute's MultiWorkerMirroredStrategy with several workers\. "
        r"Expected: `tfdist.strategies.MultiWorkerMirroredStrategy`",
    ):
        model.fit(*BATCH, verbose=0, callbacks=[make()])
    assert not model.optimizer.built


def test_subclass_is_not_rejected(two_workers):
    GradientAccumulation(2)
    two_workers.__class__ = type("Repaired", (tf.distribute.MultiWorkerMirroredStrategy,), {})
    compiled(two_workers).fit(*BATCH, verbose=0)


def test_evaluate_and_predict_are_not_rejected():
    GradientAccumulation(2)
    model = compiled(tf.distribute.MultiWorkerMirroredStrategy())
    model.fit(*BATCH, verbose=0)
    assert model.evaluate(*BATCH, verbose=0) >= 0 and model.predict(BATCH[0], verbose=0).shape == (4, 1)


def test_parameter_servers_are_rejected():
    servers = of_class(tf.distribute.ParameterServerStrategy)
    with pytest.raises(ValueError, match=r"ParameterServerStrategy\. Expected: `tfdist.strategies.ParameterServerStr"):
        strategy_support._reject_unsupported(servers, None)
    with pytest.raises(ValueError, match=r"workers of this strategy.*Expected: `tfdist.strategies.ParameterServerStra"):
        begin(FailureRecovery("no"), servers)


def test_recovery_rejects_unknown_workers(two_workers):
    with pytest.raises(ValueError, match=r"workers of this strategy.*Expected: `tfdist.strategies.MultiWorkerMirrored"):
        begin(FailureRecovery("no"), two_workers)


def test_accumulation_needs_variables_of_each_replica(cpus):
    model = compiled(tf.distribute.experimental.CentralStorageStrategy(cpus[:2]))
    with pytest.raises(
        ValueError, match=r"CentralStorageStrategy\..*Create the model under `tfdist.strategies.Mirrored"
    ):
        model.fit(*BATCH, verbose=0, callbacks=[GradientAccumulation(2)])
    assert int(model.optimizer.iterations) == 0


def test_report_needs_a_strategy_that_counts(cpus):
    with pytest.raises(ValueError, match=r"tf.distribute's MirroredStrategy with 2 replicas.*`tfdist.strategies.Mirr"):
        begin(CommunicationReport(), stock_mirrored(cpus[:2]))
    tpus = type("Two", (FakeTPUStrategy,), {"num_replicas_in_sync": 2})()
    with pytest.raises(ValueError, match=r"tf.distribute's TPUStrategy with 2 .*Remove CommunicationReport\.$"):
        begin(CommunicationReport(), tpus)


def test_strategies_have_their_public_names(cpus):
    assert describe_strategy(tf.distribute.get_strategy()) == "no strategy"
    assert describe_strategy(tf.distribute.OneDeviceStrategy("/cpu:0")) == "tf.distribute's OneDeviceStrategy"
    assert describe_strategy(of_class(tf.distribute.experimental.TPUStrategy)) == "tf.distribute's TPUStrategy"
    assert (
        describe_strategy(of_class(tf.distribute.ParameterServerStrategy)) == "tf.distribute's ParameterServerStrategy"
    )
    assert describe_strategy(MirroredStrategy(cpus[:2])) == "tfdist's MirroredStrategy"
    assert (
        suggested_replacement(FakeTPUStrategy())
        is suggested_replacement(tf.distribute.OneDeviceStrategy("/cpu:0"))
        is None
    )
    with pytest.raises(
        ValueError, match=r"Received: a model created under no strategy\. Expected: `tfdist.strategies.Pa"
    ):
        begin(WorkerReport(), tf.distribute.get_strategy())


class Batches(keras.utils.PyDataset):
    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.arrays


def test_arrays_are_protected_under_a_stock_strategy_with_one_warning(unpatched, cpus, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(strategy_support, "_has_warned_of_arrays", False)
    np.save(tmp_path / "labels.npy", np.ones([8, 1], "float32"))
    labels = np.load(tmp_path / "labels.npy", mmap_mode="r")  # TensorFlow would crash when it writes
    data = Batches(np.ones([8, 3], "float32"), labels)
    for strategy, drawn, warnings in (
        (tf.distribute.get_strategy(), data, 0),
        (stock_mirrored(cpus[:2]), tf.data.Dataset.from_tensor_slices(BATCH).batch(4), 0),
        (stock_mirrored(cpus[:2]), data, 1),
        (stock_mirrored(cpus[:2]), data, 1),
    ):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", loss="mae")
        model.fit(drawn, verbose=0, callbacks=[TrainingMonitor(tmp_path)])
        messages = [record.getMessage() for record in caplog.records if "overwrites arrays" in record.getMessage()]
        assert len(messages) == warnings
        copies = [one for one in replacements() if one.owner is python_function_results._Registry]
        assert len(copies) == bool(warnings)
    assert "Write `strategy = tfdist.strategies.MirroredStrategy(...)`" in messages[0]
    assert np.array_equal(labels, np.ones([8, 1]))


def test_tpus_are_warned_of_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(strategy_support, "_has_warned_of_tpu", False)
    caplog.set_level(logging.INFO, "tfdist")
    for make in (lambda: tf.distribute.OneDeviceStrategy("/cpu:0"), FakeTPUStrategy, FakeTPUStrategy):
        callbacks = [GradientAccumulation(1), FailureRecovery(tmp_path / make.__name__)]
        compiled(make()).fit(*BATCH, verbose=0, callbacks=callbacks)
    (record,) = [record for record in caplog.records if "TPU" in record.getMessage()]
    assert record.name == "tfdist" and record.levelno == logging.WARNING
    assert "are not tested on TPUs" in record.getMessage() and "docs/any_strategy.md" in record.getMessage()


def test_recovery_alone_warns_of_tpus(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(strategy_support, "_has_warned_of_tpu", False)
    compiled(FakeTPUStrategy()).fit(*BATCH, verbose=0, callbacks=[FailureRecovery(tmp_path)])
    assert "are not tested on TPUs" in caplog.text


def test_memory_of_other_devices_is_not_read_directly():
    """Values on a TPU or GPU are copied with `.numpy()`; NumPy reads only the memory of a CPU."""

    class OnTPU(bytearray):
        device = "/job:worker/replica:0/task:0/device:TPU:0"

        def numpy(self):
            return np.arange(3.0)

    copies = HostCopies()
    for _ in range(2):
        copy = copies.request("kernel", SimpleNamespace(read_value=OnTPU, device=OnTPU.device))
        copies.finish()
        np.testing.assert_array_equal(copy, [0.0, 1.0, 2.0])


def test_bfloat16_is_copied():
    copies = HostCopies()
    copy = copies.request("kernel", tf.Variable([1.5, 2.0], dtype=tf.bfloat16))
    copies.finish()
    assert copy.dtype == tf.bfloat16.as_numpy_dtype and copy.tolist() == [1.5, 2.0]
