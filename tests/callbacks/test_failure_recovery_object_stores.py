"""FailureRecovery on an object store: training resumes bit by bit, and continues where the store does not answer."""

import logging
import secrets

import keras
import pytest
from interruptions import Interrupt, Interrupted
from optional_packages import require
from small_training import STEPS, assert_same, fit

from tfdist.callbacks import FailureRecovery
from tfdist.checkpoint import open_store
from tfdist.utils import remote_requests

require("fsspec")
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def url():
    return f"memory://bucket/{secrets.token_hex(8)}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed"), every_epochs=100)


def saved_steps(url):
    return [entry.metadata["step"] for entry in open_store(url).list_checkpoints()]


def test_an_interrupted_training_resumes(url, undisturbed):
    with pytest.raises(Interrupted):
        fit(url, Interrupt("on_train_batch_end", STEPS + 3), every_steps=2, keep=2)
    steps = Interrupt("on_train_batch_end", 100)
    assert_same(fit(url, steps, every_steps=2, keep=2), undisturbed)
    assert steps.count == 100 - (STEPS - 2), "it resumed after the last save"
    with pytest.warns(UserWarning, match=f"Training is already complete in '{url}'"):
        assert_same(fit(url), undisturbed)


class _Outage(keras.callbacks.Callback):
    """The store refuses parts of checkpoints from one step to another."""

    def __init__(self, monkeypatch, *, first, last):
        super().__init__()
        self.first, self.last, self.is_on = first, last, False
        write = MemoryFileSystem.pipe_file

        def pipe_file(file_system, path, *arguments, **keywords):
            if self.is_on and "/parts/" in path:
                raise OSError("503 Service Unavailable")
            return write(file_system, path, *arguments, **keywords)

        monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        monkeypatch.setattr(remote_requests, "PATIENCE_SECONDS", 0.0)

    def on_train_batch_begin(self, batch, logs=None):
        self.is_on = self.first <= int(self.model.optimizer.iterations) < self.last


def test_training_continues_while_the_store_does_not_answer(url, undisturbed, monkeypatch, caplog):
    outage = _Outage(monkeypatch, first=2, last=5)
    with caplog.at_level(logging.WARNING, "tfdist"):
        result = fit(url, outage, every_steps=1, keep=100, background=False)
    assert_same(result, undisturbed)
    assert saved_steps(url) == [1, 2, *range(6, 2 * STEPS + 1), 2 * STEPS], "the last two after one step"
    told = [record.message for record in caplog.records if "training continues without a checkpoint" in record.message]
    assert len(told) == 3 and "of step 3, " in told[0] and "503 Service Unavailable" in told[0]


def test_the_last_save_must_succeed(url, monkeypatch):
    outage = _Outage(monkeypatch, first=0, last=100)
    with pytest.raises(RuntimeError, match="Checkpoint 1 could not be written. .*503 Service Unavailable"):
        fit(url, outage, every_epochs=1)
    assert saved_steps(url) == []


def test_an_address_of_an_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="Invalid `directory`: an address of unknown kind. Received: .*'nowhere://x'"):
        FailureRecovery("nowhere://x")
