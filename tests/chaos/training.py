"""The training that is disturbed: everything in it that a careless recovery would lose."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery

SAMPLES, BATCH, EPOCHS = 56, 8, 3
STEPS = SAMPLES // BATCH


def data(kind):
    """Images of noise with labels, as arrays or as a shuffled `tf.data.Dataset`."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(SAMPLES, 6)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype("int32")
    if kind == "arrays":
        return {"x": inputs, "y": labels, "batch_size": BATCH}
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(SAMPLES, seed=7).batch(BATCH)
    if kind == "unknown":
        dataset = dataset.filter(lambda *_: True)
    return {"x": dataset}


def train(folder, *, kind="tf.data", strategy=None, callbacks=(), accumulation=None, log="log.csv", **intervals):
    """Trains to the end, or until a callback raises; returns all that came of it."""
    folder, log = Path(folder), Path(folder, log)
    folder.mkdir(exist_ok=True)
    keras.utils.set_random_seed(3)
    strategy = strategy() if strategy else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(40),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.Dropout(0.4),
                keras.layers.Dense(30, activation="tanh"),
                keras.layers.Dense(2),
            ]
        )
        optimizer = keras.optimizers.Adam(
            0.01, clipnorm=1.0, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=accumulation
        )
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    random = np.random.default_rng(1)
    held_out = random.normal(size=(16, 6)).astype("float32"), random.integers(0, 2, 16).astype("int32")
    history = model.fit(
        **data(kind),
        epochs=EPOCHS,
        verbose=0,
        validation_data=held_out,
        validation_batch_size=8,
        callbacks=[
            FailureRecovery(folder / "checkpoints", **intervals),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=0.5),
            keras.callbacks.EarlyStopping("val_loss", patience=50, restore_best_weights=True),
            keras.callbacks.CSVLogger(str(log), append=True),
            *callbacks,
        ],
    )
    return {
        **{f"weight {index}": weight for index, weight in enumerate(model.get_weights())},
        **{
            f"optimizer {index} {variable.name.rpartition('_')[2]}": variable.numpy()
            for index, variable in enumerate(model.optimizer.variables)
        },
        **{f"history {name}": np.array(values) for name, values in history.history.items()},
        "epochs": np.array(history.epoch),
        "rows": np.array(log.read_text().splitlines()),
        "drawn": keras.ops.convert_to_numpy(keras.random.normal([3])),
    }


def differences(one, other):
    """The names under which two trainings are not bit-identical."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [name for name in one if not np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f")]
