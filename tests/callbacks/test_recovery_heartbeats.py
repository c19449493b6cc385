"""What FailureRecovery tells the supervisor of a training, in one process."""

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
def told(monkeypatch):
    """Returns what has been told since the last call: `fit`, `step`, `phase` and `batch`, each time that one is new."""
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
    if Heartbeat._beating is not None:
        Heartbeat._beating.close()
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


def test_batches_of_validation_are_told_of(tmp_path, told):
    fit(model(), tmp_path, epochs=2, validation_data=(INPUTS, TARGETS), validation_batch_size=8)
    assert [said[1:] for said in told()] == [
        (0, None, None),
        *[(1, None, None), (2, None, None), (2, "validation", None), (2, "validation", 1)],
        (2, "end of validation", None),  # which callbacks may make long
        *[(3, None, None), (4, None, None), (4, "validation", None), (4, "validation", 1)],
        (4, "end of validation", None),
        (4, "finished", None),
    ]


def test_every_fit_has_its_number_which_a_complete_one_counts_in(tmp_path, told):
    for _ in range(2):  # the second time as after a restart
        Heartbeat._fits = 0
        for name in ("one", "other"):
            with warnings.catch_warnings():  # that nothing is left to train
                warnings.simplefilter("ignore")
                fit(model(), tmp_path / name)
        assert dict((number, step) for number, step, *_ in told()) == {None: 2, 2: 2}


def test_no_step_is_to_follow_an_evaluation_behind_the_training(tmp_path, told):
    trained = model()
    recovery = fit(trained, tmp_path)
    trained.evaluate(INPUTS, TARGETS, verbose=0, callbacks=[recovery])
    assert {phase for _, _, phase, _ in told()} == {None, "finished"}
