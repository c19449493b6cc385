"""Output of other callbacks is in their files when FailureRecovery ends a preempted process."""

import os
import signal

import keras
import pytest
from interruptions import Interrupt
from small_training import STEPS, fit

from tfdist.recovery.preemption import exit_process

pytestmark = pytest.mark.usefixtures("cpus")


def test_events_of_a_preempted_training(tmp_path, curves):
    board = keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=1, write_graph=False)
    with pytest.raises(SystemExit, match="75"):
        fit(tmp_path / "checkpoints", board, Interrupt("on_train_batch_end", 3, signal.SIGTERM))
    assert [step for step, _ in curves(tmp_path / "logs" / "train")["batch_loss"]] == [1, 2, 3]


class Exited(BaseException):
    """Raised instead of ending the process."""


class Exit(keras.callbacks.Callback):
    """Ends the process in the last step of an epoch."""

    def __init__(self, *others):
        super().__init__()
        self.others = others

    def on_train_batch_end(self, batch, logs=None):
        if batch == STEPS - 1:
            exit_process(75, self.others, is_alone=False)


def test_a_worker_that_exits_beside_others(tmp_path, curves, monkeypatch):
    """`os._exit` flushes no buffers."""
    log = keras.callbacks.CSVLogger(tmp_path / "log")
    log.on_train_begin()
    log.on_epoch_end(0, {"loss": 1})
    log.csv_file.write("buffered")

    def end(code):
        assert [step for step, _ in curves(tmp_path / "logs" / "train")["batch_loss"]] == list(range(1, STEPS + 1))
        assert (tmp_path / "log").read_text().endswith("\n0,1,NA\nbuffered")
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", end)
    board = keras.callbacks.TensorBoard(tmp_path / "logs", update_freq=1, write_graph=False)
    with pytest.raises(Exited, match="75"):
        fit(tmp_path / "checkpoints", board, Exit(board, log))
    log.csv_file.close()


def test_a_full_disk_does_not_change_the_exit_code(tmp_path, monkeypatch, caplog):
    log = keras.callbacks.CSVLogger(tmp_path / "log")
    log.on_train_begin()
    file = log.csv_file

    class Full:
        closed = False

        def flush(self):
            raise OSError(28, "No space left on device")

    log.csv_file = Full()
    with pytest.raises(SystemExit, match="75"):
        exit_process(75, [log], is_alone=True)
    assert "may be incomplete: [Errno 28] No space left on device" in caplog.text
    file.close()
