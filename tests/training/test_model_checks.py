"""Warnings about a model before its step is traced."""

import keras
import numpy as np
import pytest

from tfdist.strategies import MultiWorkerMirroredStrategy, worker_start
from tfdist.tensorflow_internals import xla_functions
from tfdist.training import replica_step

pytestmark = pytest.mark.usefixtures("cpus")

MESSAGE = "The weights of the workers may differ in the last bit"


@pytest.fixture
def other_cpus(monkeypatch):
    """Workers 1 and 3 have other CPUs than worker 0."""
    monkeypatch.setattr(xla_functions, "_other_cpus", ())
    xla_functions.leave_xla_to_users([1, 3])
    replica_step._warn_of_other_cpus.cache_clear()


def train(strategy, jit_compile):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse", jit_compile=jit_compile)
    rows = np.ones([4, 2], "float32")
    model.fit(rows, rows[:, :1], batch_size=4, verbose=0)
    model.evaluate(rows, rows[:, :1], batch_size=4, verbose=0)


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if MESSAGE in record.getMessage()]


def test_xla_on_workers_with_different_cpus_warns_once(other_cpus, caplog):
    strategy = MultiWorkerMirroredStrategy()
    train(strategy, jit_compile=True)
    train(strategy, jit_compile=True)
    (message,) = warnings_in(caplog)
    assert "workers 1, 3 with other CPU instructions than worker 0" in message
    assert "jit_compile=False" in message


@pytest.mark.parametrize("jit_compile", [False, pytest.param("auto", marks=pytest.mark.long)])
def test_without_xla_different_cpus_do_not_matter(other_cpus, caplog, jit_compile):
    train(MultiWorkerMirroredStrategy(), jit_compile)
    assert not warnings_in(caplog)


def test_the_chief_warns_for_all(other_cpus, caplog, monkeypatch):
    monkeypatch.setattr(MultiWorkerMirroredStrategy, "rank", 1)
    train(MultiWorkerMirroredStrategy(), jit_compile=True)
    assert not warnings_in(caplog)


@pytest.mark.long
def test_equal_cpus_do_not_warn(monkeypatch, caplog):
    monkeypatch.setattr(xla_functions, "_other_cpus", ())
    train(MultiWorkerMirroredStrategy(), jit_compile=True)
    assert not warnings_in(caplog)


def test_workers_compare_their_cpus_with_the_chief(monkeypatch):
    """`compare_cpus` finds the workers whose instructions differ from those of worker 0."""
    sent = []
    monkeypatch.setattr(xla_functions, "_other_cpus", ())

    def exchange(name, own, rank, size):
        sent.append(own)
        return ["5", "7", "5", "7"]

    monkeypatch.setattr(worker_start.key_values, "exchange", exchange)
    worker_start.compare_cpus(0, 4, "cpus")
    assert sent == [str(worker_start.cpu_instructions())]
    assert xla_functions.workers_with_other_cpus() == (1, 3)
