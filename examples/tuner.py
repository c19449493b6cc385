"""Searches the hyperparameters of a network with KerasTuner; each trial trains on all workers.

    tfdist run --workers 2 examples/tuner.py --directory tuning
    tfdist run --workers 2 examples/tuner.py --directory tuning --trials 8    continues the search

Every worker runs the search, with the same seed and in the same directory, on a disk that all workers share.
"""

import shutil

import keras
import keras_tuner
import tensorflow as tf
from absl import app, flags, logging
from digits_dataset import load

from tfdist.strategies import MultiWorkerMirroredStrategy

_DIRECTORY = flags.DEFINE_string("directory", None, "Where the search stores its trials.", required=True)
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Begins a new search instead of continuing.")
_TRIALS = flags.DEFINE_integer("trials", 4, "Combinations of hyperparameters.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Passes over the training images in a trial.", lower_bound=1)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of prepared data. Default: that of TensorFlow Datasets.")


def build_model(choices: keras_tuner.HyperParameters) -> keras.Model:
    """Builds and compiles the network of a trial."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(choices.Int("units", 16, 64, step=16), activation="gelu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(choices.Choice("rate", [1e-2, 1e-3])), loss, metrics=["accuracy"])
    return model


def wait_for_all(strategy: MultiWorkerMirroredStrategy) -> None:
    """Returns when all workers have called this."""
    strategy.gather(tf.constant([strategy.rank]), axis=0)


def main(_: list[str]) -> None:
    """Searches, evaluates the best model on all workers, and prints it."""
    logging.set_verbosity(logging.WARNING)
    strategy = MultiWorkerMirroredStrategy()
    (images, labels), held_out = (
        next(part.batch(len(part)).as_numpy_iterator()) for part in load("digits", _DATA_DIR.value)
    )

    # Not `overwrite=True` of KerasTuner: each worker would remove the directory, also one in which others have begun.
    if _OVERWRITE.value and strategy.rank == 0:
        shutil.rmtree(_DIRECTORY.value, ignore_errors=True)
    wait_for_all(strategy)
    tuner = keras_tuner.RandomSearch(
        build_model,
        objective="val_accuracy",
        max_trials=_TRIALS.value,
        seed=1,  # without it, or with 0, workers would try different hyperparameters
        directory=_DIRECTORY.value,
        project_name="digits",
        distribution_strategy=strategy,
    )
    wait_for_all(strategy)  # all have read what the search writes next
    tuner.search(images, labels, validation_data=held_out, batch_size=64, epochs=_EPOCHS.value, verbose=0)
    wait_for_all(strategy)  # the chief has stored the last weights
    _, accuracy = tuner.get_best_models()[0].evaluate(*held_out, verbose=0)
    best = tuner.get_best_hyperparameters()[0].values
    print(f"worker {strategy.rank}: {len(tuner.oracle.trials)} trials, best {best}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    app.run(main)
