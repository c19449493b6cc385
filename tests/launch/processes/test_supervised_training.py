"""The launcher with real workers, which train with FailureRecovery."""

import json

import pytest
from child_environment import child_environment

LIMIT_SECONDS = 1200
# Both `fit`s train the same function: the second one's steps are short, and so is the time that is a stall.
SCRIPT = """
if ATTEMPT == 0 and RANK == 1:
    hang()

from tfdist.strategies import MultiWorkerMirroredStrategy

strategy = MultiWorkerMirroredStrategy(start_timeout_seconds=100 if ATTEMPT else 1)
import keras
import numpy as np
from tfdist.callbacks import FailureRecovery

class Hang(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        if RANK == 1 and batch == 1:
            print("hangs")
            hang()

keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = np.ones([16, 3], "float32"), np.ones([16, 1], "float32")
for name, callbacks in (("one", []), ("other", [Hang()])):
    callbacks.append(FailureRecovery(HERE / name))
    model.fit(*data, batch_size=4, validation_data=data, validation_batch_size=4, verbose=0, callbacks=callbacks)
"""


@pytest.mark.multi_process
def test_missing_peer_leads_to_a_restart_and_a_hang_in_validation_is_a_stall(start, tmp_path):
    options = ("--max-restarts", "1", "--restart-delay", "0", "--stall-timeout", "3", "--grace", "0.5")
    environment = {"PYTHONPATH": child_environment()["PYTHONPATH"]}
    ended = start(SCRIPT, *options, "--log-dir", "logs", env=environment).end(LIMIT_SECONDS)
    peer, stall = (json.loads((tmp_path / "logs" / f"attempt-{attempt}.json").read_text()) for attempt in (0, 1))
    assert peer["cause"]["rank"] == 0 and peer["cause"]["exception"] == "TimeoutError"
    assert any("The workers were not complete after 1 s" in line for line in peer["cause"]["last_lines"])
    assert "restart 1 of 1 at once with 2 workers" in ended.said
    assert ended.of(1) == ["hangs"]
    assert stall["cause"]["description"].startswith("no worker finished a batch of validation for ")
    assert (stall["last_fit"], stall["last_step"]) == (2, 4)
    assert ended.code == 1
