"""Saves, logs and backups of a program that was written for one process, on workers that share a directory.

A part of `on_workers.py`. Each rank writes what it has seen into `files-RANK.json`, for `test_shared_paths.py`.
"""

import json
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

INPUTS = np.random.default_rng(0).normal(size=(24, 64)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)
ROUNDS = 4


def compiled(strategy, seed=1):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = [keras.layers.Dense(400, activation="tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile(keras.optimizers.Adam(1e-3), loss="mse")
    return model


def difference(weights, model):
    return max(float(np.abs(one - other).max()) for one, other in zip(weights, model.get_weights(), strict=True))


def outcome(function):
    """Returns what the function returns, or the error as text."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def saves(strategy, model, folder):
    """What each way to save returns, and what the worker then reads at once, again and again."""
    other = keras.models.clone_model(model)
    weights = model.get_weights()

    def reload(save, load):
        def check():
            wrong = []
            for _ in range(ROUNDS):
                save()
                if (found := load()) != 0.0:
                    wrong.append(found)
            return wrong

        return outcome(check)

    def of(path, load):
        return lambda: (load(str(folder / path)), difference(weights, other))[1]

    def whole(path, **options):
        return lambda: difference(weights, keras.models.load_model(folder / path, **options))

    def served():
        exported = tf.saved_model.load(str(folder / "exported"))
        apart = float(np.abs(exported.serve(INPUTS).numpy() - model(INPUTS).numpy()).max())
        return 0.0 if apart < 1e-6 else apart  # another graph rounds in another order

    (folder / "assets.txt").write_text("words\n" * 1000)
    module = tf.Module()
    module.asset = tf.saved_model.Asset(str(folder / "assets.txt"))
    module.value = tf.Variable(2.0)
    checkpoint = tf.train.Checkpoint(model=model)
    manager = tf.train.CheckpointManager(checkpoint, str(folder / "managed"), max_to_keep=2)
    restored = tf.train.Checkpoint(model=other)

    def save_in_step():
        # A manager removes old checkpoints: as in a training, no worker is more than one save ahead of another.
        strategy.gather(tf.zeros([1]), axis=0)
        manager.save()

    def restore(path):
        restored.restore(path).expect_partial()
        return difference(weights, other)

    return {
        "keras": reload(lambda: model.save(folder / "model.keras"), whole("model.keras")),
        "h5": reload(lambda: model.save(folder / "made" / "model.h5"), whole("made/model.h5", compile=False)),
        "weights": reload(
            lambda: model.save_weights(folder / "model.weights.h5"), of("model.weights.h5", other.load_weights)
        ),
        "sharded": reload(
            lambda: model.save_weights(folder / "parts.weights.json", max_shard_size=2e-4),
            of("parts.weights.json", other.load_weights),
        ),
        "directory": reload(lambda: model.save(folder / "unzipped", zipped=False), whole("unzipped")),
        "export": reload(lambda: model.export(folder / "exported", verbose=False), served),
        "saved_model": reload(
            lambda: tf.saved_model.save(module, str(folder / "saved")),
            lambda: float(tf.saved_model.load(str(folder / "saved")).value) - 2.0,
        ),
        "checkpoint": reload(
            lambda: checkpoint.write(str(folder / "written")), lambda: restore(str(folder / "written"))
        ),
        "manager": reload(save_in_step, lambda: restore(manager.latest_checkpoint)),
        "returned": [checkpoint.write(folder / "returned"), checkpoint.save(folder / "numbered")],
        "kept": [os.path.basename(path) for path in manager.checkpoints],
        "asked": outcome(lambda: model.save(folder / "once.keras", overwrite=False)),
    }


class Interrupt(keras.callbacks.Callback):
    """Ends a training at the beginning of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise InterruptedError


def fits(strategy, folder):
    """Trains with each callback that writes, is interrupted, and trains again."""

    def fit(*callbacks, epochs=4, **paths):
        model = compiled(strategy)
        best = keras.callbacks.ModelCheckpoint(folder / "best" / "model.keras", monitor="loss", save_best_only=True)
        logger = keras.callbacks.CSVLogger(folder / paths.get("log", "log.csv"), append=True)
        board = keras.callbacks.TensorBoard(folder / "board", update_freq=1)
        backup = keras.callbacks.BackupAndRestore(folder / paths.get("backup", "backup"))
        written = [best, logger, board, backup]
        history = outcome(
            lambda: (
                model.fit(
                    INPUTS, TARGETS, batch_size=12, epochs=epochs, verbose=0, callbacks=[*written, *callbacks]
                ).epoch
            )
        )
        unchanged = (logger.filename, board.log_dir, str(backup.backup_dir))
        return (
            model,
            history,
            [str(Path(path).relative_to(folder)) for path in unchanged if path.startswith(str(folder))],
        )

    rank = strategy.rank
    interrupted = fit(Interrupt(2))[1]
    model, epochs, paths = fit(*([keras.callbacks.CSVLogger(folder / "chief.csv")] if rank == 0 else []))
    best = difference(model.get_weights(), keras.models.load_model(folder / "best" / "model.keras"))
    fit(Interrupt(2), backup=f"backup-{rank}", log=f"log-{rank}.csv")
    if rank == 1:  # as if it had been killed before its last save
        (folder / "backup-1" / "training_metadata.json").write_text('{"epoch": 1, "batch": 0}')
    differing = fit(backup=f"backup-{rank}", log=f"log-{rank}.csv")[1]
    return {"interrupted": interrupted, "epochs": epochs, "paths": paths, "best": best, "differing": differing}


def write_files(strategy, folder: Path) -> None:
    """Writes files to a directory that all workers share."""
    folder.mkdir(exist_ok=True)
    model = compiled(strategy)
    model.fit(INPUTS, TARGETS, batch_size=12, verbose=0)
    seen = {"saves": saves(strategy, model, folder), "fits": fits(strategy, folder)}
    model.save(folder / f"model-{strategy.rank}.keras")
    if strategy.rank == 1:  # saving takes no other worker
        model.save(folder / "alone.keras")
    Path(folder, f"files-{strategy.rank}.json").write_text(json.dumps(seen))
