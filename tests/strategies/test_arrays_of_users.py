"""Arrays and memory-mapped files that a program draws batches from are the same, byte by byte, after a training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import MirroredStrategy, ModelParallelStrategy, Pipeline

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


def on_batches(strategy, arrays):
    model = compiled(strategy)
    for inputs, labels in Batches(arrays):
        model.train_on_batch(inputs, labels)
        model.predict_on_batch(inputs)


def custom_loop(strategy, arrays):
    variable = tf.Variable(0.5)

    def in_place(inputs, labels):
        return [tf.reduce_sum(tf.abs(part * variable)) for part in (inputs, labels)]

    @tf.function
    def step(inputs, labels):
        return strategy.run(in_place, (inputs, labels))

    per_worker = strategy.distribute_datasets_from_function(lambda _: pipeline(arrays))
    for data in (strategy.experimental_distribute_dataset(pipeline(arrays)), per_worker, Batches(arrays)):
        for batch in data:
            step(*batch)

    @tf.function
    def loop(iterator):
        for _ in range(BATCHES):
            strategy.run(in_place, next(iterator))

    loop(iter(strategy.experimental_distribute_dataset(pipeline(arrays))))


def in_stages(strategy, arrays):
    compiled(strategy).fit(Batches(arrays), verbose=0)


def mirrored(cpus):
    return MirroredStrategy(cpus[:2])


def stages(cpus):
    return ModelParallelStrategy(cpus[:2], pipeline=Pipeline(stages=2, micro_batches=2))


PATHS = {
    "fit, evaluate, predict": (mirrored, fit),
    "single batches": (mirrored, on_batches),
    "custom loops": (mirrored, custom_loop),
    "stages": (stages, in_stages),
}


@pytest.mark.parametrize(("strategy", "train"), PATHS.values(), ids=PATHS)
def test_arrays_do_not_change(cpus, files, strategy, train):
    arrays, changed = files
    train(strategy(cpus), arrays)
    assert changed() == [0, 0]
