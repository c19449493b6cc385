"""Keras' callbacks that write, as on a worker in whose place another one writes; the exchange is the test's."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest

from tfdist.keras_internals.saved_files import SharedPaths, patch_callback_files

pytestmark = pytest.mark.usefixtures("cpus")
INPUTS = np.arange(8.0, dtype="float32").reshape(4, 2)


class Exchange:
    """What a worker says to the others, and what it learns from them."""

    def __init__(self):
        self.elsewhere, self.others_have_backups = frozenset(), False
        self.said, self.starts = [], []

    def share(self, strategy, paths, has_backups):
        self.said.append((sorted(paths), has_backups))
        return SharedPaths(self.elsewhere, has_backups or self.others_have_backups)

    def compare(self, strategy, epoch, updates):
        self.starts.append((epoch, updates))


@pytest.fixture
def exchange(unpatched, monkeypatch, tmp_path):
    """Patches this process as one of several workers; paths of the test are relative to its directory."""
    monkeypatch.chdir(tmp_path)
    exchange = Exchange()
    patch_callback_files(lambda strategy: True, exchange.share, exchange.compare)
    return exchange


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", run_eagerly=True)
    return model


def fit(model, *callbacks, epochs=2):
    return model.fit(INPUTS, INPUTS[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks)).epoch


def written():
    """The files and directories below the one of the test."""
    return {str(path): path.stat().st_mtime_ns for path in Path().rglob("*")}


class Attributes(keras.callbacks.Callback):
    """What `written` returns and the attributes of other callbacks, at the end of an epoch of `fit`."""

    def __init__(self, *others):
        super().__init__()
        self.others = others

    def on_epoch_end(self, epoch, logs=None):
        self.seen = [dict(vars(other)) for other in self.others]


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise InterruptedError


def test_what_another_worker_writes_is_written_to_a_directory_that_is_removed(exchange, model):
    exchange.elsewhere = frozenset({"log.csv", "board"})
    logger, board = keras.callbacks.CSVLogger("log.csv"), keras.callbacks.TensorBoard("board")
    attributes = Attributes(logger, board)
    fit(model, logger, board, attributes)
    assert exchange.said == [(["board", "log.csv"], False)]
    assert written() == {}
    redirected = [attributes.seen[0]["filename"], attributes.seen[1]["log_dir"], attributes.seen[1]["_train_dir"]]
    assert [os.path.basename(path) for path in redirected] == ["log.csv", "board", "train"]
    assert not any(os.path.exists(os.path.dirname(path)) for path in redirected)
    assert (logger.filename, board.log_dir) == ("log.csv", "board")


def test_a_worker_writes_the_paths_that_no_other_writes(exchange, model):
    exchange.elsewhere = frozenset({"log.csv"})
    board, backup = keras.callbacks.TensorBoard("board"), keras.callbacks.BackupAndRestore("backup")
    fit(model, keras.callbacks.CSVLogger("log.csv"), keras.callbacks.CSVLogger("own.csv"), board, backup)
    assert {"own.csv", "board/train"} <= written().keys() and "log.csv" not in written()
    assert "backup" not in written()  # it is removed at the end


def test_a_backup_of_another_worker_is_read_and_neither_changed_nor_removed(exchange, model):
    with pytest.raises(InterruptedError):
        fit(model, keras.callbacks.BackupAndRestore("backup"), Interrupt())
    before = written()
    assert "backup/latest.weights.h5" in before
    exchange.elsewhere = frozenset({"backup"})
    backup = keras.callbacks.BackupAndRestore("backup", double_checkpoint=True)
    assert fit(model, backup, epochs=3) == [1, 2]
    assert written() == before
    assert backup._weights_path == "backup/latest.weights.h5"


def test_workers_compare_where_they_begin_if_any_has_a_backup(exchange, model):
    fit(model, keras.callbacks.CSVLogger("log.csv"))
    assert exchange.starts == []
    exchange.others_have_backups = True
    fit(model, keras.callbacks.CSVLogger("log.csv"))
    assert exchange.starts == [(0, 2)]
    exchange.others_have_backups = False
    with pytest.raises(InterruptedError):
        fit(model, keras.callbacks.BackupAndRestore("backup"), Interrupt())
    fit(model, keras.callbacks.BackupAndRestore("backup"))
    assert exchange.starts == [(0, 2), (0, 4), (1, 5)]


def test_callbacks_of_a_fit_that_an_exception_has_ended_have_their_paths_in_the_next_one(exchange, model):
    logger = keras.callbacks.CSVLogger("log.csv")
    exchange.elsewhere = frozenset({"log.csv"})
    with pytest.raises(InterruptedError):
        fit(model, logger, Interrupt())
    exchange.elsewhere = frozenset()
    fit(model, logger)
    assert [paths for paths, _ in exchange.said] == [["log.csv"]] * 2
    assert len(Path("log.csv").read_text().splitlines()) == 3


def test_attributes_with_other_paths_stay(exchange, model):
    logger = keras.callbacks.CSVLogger(Path("log"))
    logger.beside, logger.within, logger.number = "log-of-another", Path("log/within"), 3
    exchange.elsewhere = frozenset({"log"})
    attributes = Attributes(logger)
    fit(model, logger, attributes)
    (seen,) = attributes.seen
    assert (seen["beside"], seen["number"]) == ("log-of-another", 3)
    assert str(seen["within"]) == f"{seen['filename']}/within" != "log/within"
    assert logger.within == Path("log/within")


def test_a_path_that_ends_with_a_slash_is_the_one_without(exchange, model):
    exchange.elsewhere = frozenset({"board"})
    fit(model, keras.callbacks.TensorBoard("board/"))
    assert exchange.said == [(["board"], False)]
    assert written() == {}


def test_workers_exchange_paths_in_fit_only(exchange, model):
    board = keras.callbacks.TensorBoard("board")
    model.evaluate(INPUTS, INPUTS[:, :1], verbose=0, callbacks=[board])
    model.predict(INPUTS, verbose=0, callbacks=[board])
    keras.callbacks.CallbackList([board], model=model)
    assert exchange.said == []
    fit(model, keras.callbacks.EarlyStopping(monitor="loss"))
    assert exchange.said == [([], False)]  # others may have paths
