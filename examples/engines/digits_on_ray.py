"""Trains a network on images of digits, on workers beside actors of Ray.

    python examples/engines/digits_on_ray.py                  a Ray of this host, which the program starts
    python examples/engines/digits_on_ray.py --address auto   a Ray cluster that runs already

The last line compares the result with the same training in this process.
"""

import tempfile
from contextlib import ExitStack
from typing import Any

import numpy as np
import ray
from absl import app, flags

from tfdist.launch import on_ray

_ADDRESS = flags.DEFINE_string("address", None, "Address of a Ray cluster, or auto. Default: a Ray of this host.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers, each with a core.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Passes over the training images.", lower_bound=1)
_DIRECTORY = flags.DEFINE_string("directory", None, "For checkpoints; all hosts see it. Default: a temporary one.")


def train(epochs: int, directory: str = "") -> tuple[float, list[np.ndarray]]:
    """Returns the accuracy and the weights of a training: in one of several workers, or here without a directory."""
    # Not above: the program itself needs no TensorFlow until all workers have ended.
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits

    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy() if directory else tf.distribute.get_strategy()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    is_held_out = np.arange(len(images)) % 5 == 4
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="gelu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    callbacks = [FailureRecovery(directory)] if directory else []
    model.fit(images[~is_held_out], labels[~is_held_out], 64, epochs, verbose=0, callbacks=callbacks)
    _, accuracy = model.evaluate(images[is_held_out], labels[is_held_out], verbose=0)
    return accuracy, model.get_weights()


def main(_: list[str]) -> None:
    """Trains on the cluster, then in this process, and prints the comparison."""
    with ExitStack() as stack:
        directory = _DIRECTORY.value or stack.enter_context(tempfile.TemporaryDirectory())
        local: dict[str, Any] = {"num_cpus": _WORKERS.value, "include_dashboard": False}
        ray.init(_ADDRESS.value, **({} if _ADDRESS.value else local))
        stack.callback(ray.shutdown)
        values = on_ray(train, _EPOCHS.value, directory, workers=_WORKERS.value, max_restarts=2)
    accuracy, weights = values[0]
    one_accuracy, one_weights = train(_EPOCHS.value)
    difference = max(np.max(np.abs(a - b)) for a, b in zip(weights, one_weights, strict=True))
    print(
        f"digits: {len(values)} workers on Ray {accuracy:.1%}, one process {one_accuracy:.1%} held-out accuracy; "
        f"largest weight difference {difference:.0e}".replace("%", " %")
    )


if __name__ == "__main__":
    app.run(main)
