"""Trains a small convolutional network on images of digits, with any number of workers.

    tfdist run --workers 2 examples/digits.py      two workers on this host
    python examples/digits.py                      one worker, all of its devices

The last line compares the result with the same training in one process without a strategy.
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging
from digits_dataset import load

from tfdist.strategies import MultiWorkerMirroredStrategy

_DATASET = flags.DEFINE_enum("dataset", "digits", ["digits", "mnist"], "digits needs no download, mnist does.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of prepared data. Default: that of TensorFlow Datasets.")
_EPOCHS = flags.DEFINE_integer("epochs", 15, "Passes over the training images.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a step, over all workers.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "For the initial weights and the order of the images.")


def build_model(image_shape: tuple[int, ...]) -> keras.Model:
    """Builds and compiles the network.

    All its functions are smooth: at the kinks of ReLU or maximum pooling, a difference in the last bit would grow with
    every step.
    """
    model = keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="gelu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def batches(images: tf.data.Dataset, *, shuffle: bool = False) -> tf.data.Dataset:
    """Batches for all workers together."""
    # Each worker takes its part of every batch. (By default TensorFlow splits a dataset's files over the workers.)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    images = images.cache()
    if shuffle:
        images = images.shuffle(len(images), seed=_SEED.value)
    return images.batch(_BATCH_SIZE.value).prefetch(tf.data.AUTOTUNE).with_options(options)


def train(strategy: tf.distribute.Strategy, *, verbose: int = 0) -> tuple[float, list[np.ndarray]]:
    """Trains under `strategy`; returns the accuracy on held-out images and the weights."""
    images, held_out = load(_DATASET.value, _DATA_DIR.value)
    keras.utils.set_random_seed(_SEED.value)  # after loading, which may draw random names
    with strategy.scope():
        model = build_model(tuple(images.element_spec[0].shape))
    model.fit(batches(images, shuffle=True), epochs=_EPOCHS.value, shuffle=False, verbose=verbose)
    _, accuracy = model.evaluate(batches(held_out), verbose=0)
    return accuracy, model.get_weights()


def main(_: list[str]) -> None:
    """Trains with all workers, then in one process, and prints the comparison."""
    logging.set_verbosity(logging.WARNING)
    strategy = MultiWorkerMirroredStrategy()
    accuracy, weights = train(strategy, verbose=2)

    # Every worker trains again, so that none exits while another still works. The chief prints.
    one_accuracy, one_weights = train(tf.distribute.get_strategy())
    if strategy.rank == 0:
        difference = max(np.max(np.abs(a - b)) for a, b in zip(weights, one_weights, strict=True))
        workers = strategy.num_workers
        print(
            f"{_DATASET.value}: {workers} worker{'s'[: workers > 1]} {accuracy:.1%}, one process {one_accuracy:.1%} "
            f"held-out accuracy; largest weight difference {difference:.0e}".replace("%", " %")
        )


if __name__ == "__main__":
    app.run(main)
