"""Trains a network on images of digits in a DataFrame of Spark, on workers beside its executors.

    python examples/engines/digits_on_spark.py                                             a cluster on this host
    spark-submit examples/engines/digits_on_spark.py --master= --directory /shared/digits  a cluster that runs already

The last line compares the result with the same training in this process.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from pyspark.sql import DataFrame, SparkSession

from tfdist.data import PartitionedData, from_spark
from tfdist.launch import on_spark

_MASTER = flags.DEFINE_string("master", "local-cluster[2,1,1024]", "Spark's master; empty: as spark-submit says.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers, each in a slot of Spark.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Passes over the training images.", lower_bound=1)
_DIRECTORY = flags.DEFINE_string("directory", None, "For data and checkpoints; all hosts see it. Default: temporary.")


def train(data: PartitionedData, epochs: int, streams: int, directory: str = "") -> list[np.ndarray]:
    """Returns the weights after a training: in one of several workers, or here without a directory."""
    # Not above: the driver sends this function to the workers, and needs no TensorFlow until it compares.
    import keras
    import tensorflow as tf

    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy() if directory else tf.distribute.get_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    batches = data.dataset(64, features="pixels", label="digit", shuffle=True, streams=streams)
    callbacks = [FailureRecovery(directory)] if directory else []
    model.fit(batches, epochs=epochs, verbose=0, callbacks=callbacks)
    return [np.asarray(weight) for weight in model.get_weights()]


def digits(spark: SparkSession) -> DataFrame:
    """Returns the images as arrays of 64 numbers, with their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = [([float(pixel) / 16 for pixel in image], int(label)) for image, label in zip(images, labels, strict=True)]
    return spark.createDataFrame(rows, "pixels array<float>, digit int").repartition(4)


def main(_: list[str]) -> None:
    """Trains on the cluster, then in this process, and prints the comparison."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder.appName("digits").config("spark.ui.enabled", "false")
    with ExitStack() as stack:
        spark = (builder.master(_MASTER.value) if _MASTER.value else builder).getOrCreate()
        stack.callback(spark.stop)
        directory = Path(_DIRECTORY.value or stack.enter_context(tempfile.TemporaryDirectory()))
        data = stack.enter_context(from_spark(digits(spark), store=directory / "data"))
        arguments = data, _EPOCHS.value, _WORKERS.value
        checkpoints = str(directory / "checkpoints")
        values = on_spark(train, *arguments, checkpoints, spark=spark, workers=_WORKERS.value, max_restarts=2)
        one = train(*arguments)
    difference = max(np.max(np.abs(a - b)) for a, b in zip(values[0], one, strict=True))
    print(f"digits: {len(values)} workers on Spark; largest weight difference to one process {difference:.0e}")


if __name__ == "__main__":
    app.run(main)
