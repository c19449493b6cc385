"""A Horovod program after its conversion; docs/migrating_from_horovod.md shows the original.

    tfdist run --workers 2 examples/migrating/horovod_after.py

`hvd.init`, the pinning of GPUs, the sharding of the data, the scaled learning rate, `DistributedOptimizer`, and the
callbacks that broadcast variables and average metrics are removed. What remains is Keras in a strategy's scope.
"""

import sys
from pathlib import Path

import keras
import tensorflow as tf
from absl import app, flags, logging

sys.path.append(str(Path(__file__).resolve().parents[1]))
from digits_dataset import load

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import MultiWorkerMirroredStrategy

_EPOCHS = flags.DEFINE_integer("epochs", 4, "Passes over the training images.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 64, "Images in a step, over all workers.", lower_bound=1)
_DIRECTORY = flags.DEFINE_string("directory", "horovod_after", "Directory of checkpoints and the model.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of prepared data. Default: that of TensorFlow Datasets.")
_PASSES = 2


def build_model() -> keras.Model:
    """Builds the network of the original program, unchanged."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def batches(images: tf.data.Dataset) -> tf.data.Dataset:
    """Batches for all workers; each takes its part of every batch. Replaces `dataset.shard(size, rank)`."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return images.batch(_BATCH_SIZE.value).prefetch(tf.data.AUTOTUNE).with_options(options)


def main(_: list[str]) -> None:
    """Trains, evaluates and saves."""
    logging.set_verbosity(logging.WARNING)
    strategy = MultiWorkerMirroredStrategy(compression="fp16")  # hvd.init and compression=hvd.Compression.fp16
    directory = Path(_DIRECTORY.value)
    images, held_out = load("digits", _DATA_DIR.value)
    keras.utils.set_random_seed(0)  # the same weights and order on all workers
    with strategy.scope():
        model = build_model()
        # LearningRateWarmupCallback: a schedule counts updates; the rate is not multiplied by the number of workers.
        updates = len(images) // (_BATCH_SIZE.value * _PASSES)  # per epoch
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, updates * _EPOCHS.value, warmup_target=3e-3, warmup_steps=updates
        )
        model.compile(
            keras.optimizers.Adam(rate, gradient_accumulation_steps=_PASSES),  # backward_passes_per_step
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(
        batches(images.shuffle(len(images))),
        epochs=_EPOCHS.value,
        shuffle=False,
        verbose=2,  # printed once, by worker 0
        callbacks=[FailureRecovery(directory / "checkpoints")],  # hvd.elastic
    )
    loss, accuracy = model.evaluate(batches(held_out), verbose=0)  # over all workers; replaces MetricAverageCallback
    if strategy.rank == 0:
        model.save(directory / "model.keras")
        print(f"{strategy.num_workers} workers: held-out loss {loss:.3f}, accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    app.run(main)
