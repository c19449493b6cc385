"""The training that is interrupted: it has every kind of state that recovery must restore."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery
from tfdist.keras_internals.seed_generators import forget_global_seed_generator

SAMPLES, BATCH, EPOCHS = 56, 8, 3
STEPS = SAMPLES // BATCH
NAN_STEP = 4  # from 1


class Batches(keras.utils.PyDataset):
    """Arrays in batches, the samples in a different order in every epoch."""

    def __init__(self, *arrays, **arguments):
        super().__init__(**arguments)
        self._arrays, self._order = arrays, np.arange(SAMPLES)
        self._random = np.random.default_rng(5)

    @property
    def num_batches(self):
        return STEPS

    def __getitem__(self, index):
        rows = self._order[index * BATCH : (index + 1) * BATCH]
        return tuple(array[rows] for array in self._arrays)

    def on_epoch_end(self):
        self._random.shuffle(self._order)


def endlessly(*arrays):
    """Batches of arrays, in other orders, from a generator."""
    random = np.random.default_rng(5)
    while True:
        rows = random.choice(SAMPLES, BATCH, replace=False)
        yield tuple(array[rows] for array in arrays)


class Samples(keras.layers.Layer):
    """Removes the ids, the first column, from samples, and reports those in training by `tell(replica, ids)`."""

    def __init__(self, tell):
        super().__init__(dtype="float32")
        self.tell = tell

    def call(self, inputs, training=False):
        if training and self.tell:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            tf.py_function(lambda *values: self.tell(*(value.numpy() for value in values)), [replica, inputs[:, 0]], [])
        return inputs[:, 1:]


def grain_dataset(*arrays):
    """Batches of arrays, the samples in a different order in every epoch, without an end."""
    import grain

    samples = list(zip(*arrays, strict=True))
    return grain.MapDataset.source(samples).seed(7).shuffle().repeat().to_iter_dataset().batch(BATCH)


def stateful_data_loader(*arrays):
    """The same by torchdata, with processes, until the end of an epoch."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
    generator = torch.Generator()
    generator.manual_seed(7)
    return StatefulDataLoader(samples, batch_size=BATCH, shuffle=True, generator=generator, num_workers=2)


def data(kind):
    """Noise with labels, as arguments of `fit`: a shuffled dataset if no other kind. Its ids, from 1, come first."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(SAMPLES, 6)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype("int32")
    inputs = np.concatenate([np.arange(1, SAMPLES + 1, dtype="float32")[:, None], inputs], axis=1)
    if kind == "NaN":
        inputs[NAN_STEP * BATCH - 1, -1] = np.nan  # the last of its batch
        return {"x": inputs, "y": labels, "batch_size": BATCH, "shuffle": False}
    if kind == "arrays":
        return {"x": inputs, "y": labels, "batch_size": BATCH}
    if kind == "PyDataset":
        return {"x": Batches(inputs, labels), "shuffle": True}
    if kind == "PyDataset with threads":
        return {"x": Batches(inputs, labels, workers=2), "shuffle": True}
    if kind == "Grain":
        return {"x": grain_dataset(inputs, labels), "steps_per_epoch": STEPS}
    if kind == "StatefulDataLoader":
        return {"x": stateful_data_loader(inputs, labels)}
    if kind == "generator":
        return {"x": endlessly(inputs, labels), "steps_per_epoch": STEPS}
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(SAMPLES, seed=7).batch(BATCH)
    if kind == "unknown":
        dataset = dataset.filter(lambda *_: True)
    return {"x": dataset}


def train(
    folder,
    *,
    kind="tf.data",
    strategy=None,
    callbacks=(),
    accumulation=None,
    steps_per_execution=1,
    log="log.csv",
    epochs=EPOCHS,
    tell=None,
    checkpoints=None,
    **intervals,
):
    """Trains to the end, or until a callback raises; returns all results."""
    folder, log = Path(folder), Path(folder, log)
    folder.mkdir(exist_ok=True)
    keras.utils.set_random_seed(3)
    forget_global_seed_generator()  # as in a new process: before Keras 3.13, the function above leaves it
    strategy = strategy() if strategy else tf.distribute.get_strategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((7,)),
                Samples(tell),
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
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
    random = np.random.default_rng(1)
    held_out = random.normal(size=(16, 7)).astype("float32"), random.integers(0, 2, 16).astype("int32")
    history = model.fit(
        **data(kind),
        epochs=epochs,
        verbose=0,
        validation_data=held_out,
        validation_batch_size=8,
        callbacks=[
            FailureRecovery(checkpoints or folder / "checkpoints", **intervals),
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
        **{f"metric {name}": np.array(value) for name, value in model.get_metrics_result().items()},
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
