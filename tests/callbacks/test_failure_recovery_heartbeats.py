"""Heartbeats of FailureRecovery."""

import json
import socket
import warnings

import keras
import numpy as np
import pytest

from tfdist.callbacks import FailureRecovery
from tfdist.cluster import heartbeat
from tfdist.cluster.heartbeat import VARIABLE, Heartbeat

pytestmark = pytest.mark.usefixtures("cpus")
INPUTS, TARGETS = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")


@pytest.fixture
def sent(monkeypatch):
    """`sent()`: the changes of `fit`, `step`, `phase` and `batch` since the last call."""
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv(VARIABLE, str(worker.fileno()))
    monkeypatch.setattr(Heartbeat, "_fits", 0)
    monkeypatch.setattr(heartbeat, "_STEP_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 1000.0)
    supervisor.setblocking(False)

    def read():
        new = []
        try:
            while True:
                said = json.loads(supervisor.recv(65_536))
                known = tuple(said.get(key) for key in ("fit", "step", "phase", "batch"))
                if "step" in said and new[-1:] != [known]:
                    new.append(known)
        except BlockingIOError:
            return new

    yield read
    if Heartbeat._active is not None:
        Heartbeat._active.close()
    supervisor.close()
    worker.close()


def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", loss="mse")
    return made


def fit(trained, directory, **more):
    recovery = FailureRecovery(directory)
    trained.fit(INPUTS, TARGETS, batch_size=8, verbose=0, callbacks=[recovery], **more)
    return recovery


def test_batches_of_validation_are_sent(tmp_path, sent):
    fit(model(), tmp_path, epochs=2, validation_data=(INPUTS, TARGETS), validation_batch_size=8)
    assert [said[1:] for said in sent()] == [
        (0, None, None),
        *[(1, None, None), (2, None, None), (2, "validation", None), (2, "validation", 1)],
        (2, "end of validation", None),  # callbacks may take long here
        *[(3, None, None), (4, None, None), (4, "validation", None), (4, "validation", 1)],
        (4, "end of validation", None),
        (4, "finished", None),
    ]


def test_fits_are_numbered_including_complete_ones(tmp_path, sent):
    for _ in range(2):  # the second time like after a restart
        Heartbeat._fits = 0
        for name in ("one", "other"):
            with warnings.catch_warnings():  # training is already complete
                warnings.simplefilter("ignore")
                fit(model(), tmp_path / name)
        assert dict((number, step) for number, step, *_ in sent()) == {None: 2, 2: 2}


def test_no_step_is_expected_after_an_evaluation_after_training(tmp_path, sent):
    trained = model()
    recovery = fit(trained, tmp_path)
    trained.evaluate(INPUTS, TARGETS, verbose=0, callbacks=[recovery])
    assert {phase for _, _, phase, _ in sent()} == {None, "finished"}
