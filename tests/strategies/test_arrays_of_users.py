"""Arrays and memory-mapped files that a program draws batches from are the same, byte by byte, after a training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals import python_function_results

BATCH, BATCHES, WIDTH = 32, 4, 16  # a row of 64 bytes: TensorFlow copies slices that begin between such
SPEC = (tf.TensorSpec([BATCH, WIDTH]), tf.TensorSpec([BATCH, WIDTH]))


@pytest.fixture
def files(tmp_path):
    """Memory-mapped inputs and labels, and a function that returns how many of their values have changed."""
    original = np.random.default_rng(0).normal(size=(2, BATCH * BATCHES, WIDTH)).astype("float32")
    for name, values in zip(("inputs", "labels"), original, strict=True):
        np.save(tmp_path / f"{name}.npy", values)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r+") for name in ("inputs", "labels")]

    def changed():
        return [int(np.sum(np.load(file.filename) != values)) for file, values in zip(mapped, original, strict=True)]

    return mapped, changed


class Batches(keras.utils.PyDataset):
    def __init__(self, arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return BATCHES

    def __getitem__(self, index):
        return tuple(array[index * BATCH : (index + 1) * BATCH] for array in self.arrays)


def generator(arrays):
    while True:
        yield from (Batches(arrays)[index] for index in range(BATCHES))


def pipeline(arrays):
    return tf.data.Dataset.from_generator(lambda: iter(Batches(arrays)), output_signature=SPEC).take(BATCHES)


def compiled(strategy, **arguments):
    """A model with operations that reuse the memory of a batch, in its first layer and in its loss."""
    with strategy.scope():
        layers = [keras.Input((WIDTH,)), keras.layers.Rescaling(2.0), keras.layers.Dense(WIDTH)]
        model = keras.Sequential([*layers, keras.layers.Dense(WIDTH)])
        model.compile(keras.optimizers.SGD(0.1), loss="mae", **arguments)
    return model


def fit(strategy, arrays):
    model = compiled(strategy)
    model.fit(Batches(arrays), validation_data=pipeline(arrays), verbose=0)
    model.predict(generator(arrays), steps=BATCHES, verbose=0)


def test_arrays_do_not_change(cpus, files, monkeypatch):
    arrays, changed = files
    fit(MirroredStrategy(cpus[:2]), arrays)
    assert changed() == [0, 0]
    monkeypatch.setattr(python_function_results, "_copied", lambda result: result)
    fit(MirroredStrategy(cpus[:2]), arrays)
    assert changed() != [0, 0]  # without this, a newer TensorFlow needs no copies
