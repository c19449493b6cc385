"""Searches hyperparameters with scikit-learn's GridSearchCV; each fit trains on two workers of a Dask cluster.

    python examples/engines/grid_search_on_dask.py                              a cluster on this host
    python examples/engines/grid_search_on_dask.py --scheduler tcp://host:8786  a cluster that runs already

It compares the scores with those of the same search in one process.
"""

from contextlib import ExitStack
from typing import Any

import joblib
import numpy as np
from absl import app, flags
from distributed import Client, LocalCluster
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV

from tfdist.launch import on_dask

_SCHEDULER = flags.DEFINE_string("scheduler", None, "Address of a Dask scheduler. Default: a cluster on this host.")
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Passes over the images in each fit.", lower_bound=1)
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers of each fit.", lower_bound=1)
_FITS = flags.DEFINE_integer("fits", 1, "Fits at a time, each on other Dask workers.", lower_bound=1)
_GRID = {"units": [16, 64], "learning_rate": [1e-3, 1e-2]}


class DigitsClassifier(ClassifierMixin, BaseEstimator):
    """A network with one hidden layer, as an estimator of scikit-learn.

    Args:
        units: Width of the hidden layer.
        learning_rate: Of Adam.
        epochs: Passes over the images.
        workers: Dask workers that `fit` trains on; 0: it trains in this process.
    """

    def __init__(self, units: int = 32, learning_rate: float = 3e-3, epochs: int = 4, workers: int = 0) -> None:
        self.units, self.learning_rate, self.epochs, self.workers = units, learning_rate, epochs, workers

    def fit(self, images: np.ndarray, labels: np.ndarray) -> "DigitsClassifier":
        """Trains the network."""
        self.classes_, classes = np.unique(labels, return_inverse=True)
        if self.workers:
            self.weights_ = on_dask(train, self.get_params(), images, classes, workers=self.workers)[0]
        else:
            self.weights_ = train(self.get_params(), images, classes)
        return self

    def predict_proba(self, images: np.ndarray) -> np.ndarray:
        """Returns the probabilities of the classes, here or wherever scikit-learn scores."""
        model = build_model(images.shape[1], len(self.classes_), **self.get_params())
        model.set_weights(self.weights_)
        return np.asarray(model.predict(images, verbose=0))

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Returns the most probable classes."""
        return self.classes_[self.predict_proba(images).argmax(axis=1)]


def build_model(features: int, classes: int, *, units: int, learning_rate: float, **_: Any) -> Any:
    """Builds and compiles the network."""
    import keras

    layers = [
        keras.Input((features,)),
        keras.layers.Dense(units, activation="gelu"),
        keras.layers.Dense(classes, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy")
    return model


def train(params: dict[str, Any], images: np.ndarray, classes: np.ndarray) -> list[np.ndarray]:
    """Returns the weights after a training, in this process or in one of several workers."""
    # Not above: the workers of a LocalCluster import this file, too, and need no TensorFlow.
    import keras
    import tensorflow as tf

    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy() if params["workers"] else tf.distribute.get_strategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(images.shape[1], int(classes.max()) + 1, **params)
    model.fit(images, classes, batch_size=64, epochs=params["epochs"], verbose=0)
    return model.get_weights()


def search(workers: int, fits: int = 1) -> GridSearchCV:
    """Searches the grid, with so many workers for each fit."""
    images, labels = load_digits(return_X_y=True)
    estimator = DigitsClassifier(epochs=_EPOCHS.value, workers=workers)
    grid = GridSearchCV(
        estimator, _GRID, cv=2, scoring=["accuracy", "neg_log_loss"], refit="accuracy", error_score="raise"
    )
    # Threads, as each fit only waits for its workers, which are processes on the hosts of Dask.
    with joblib.parallel_config("threading", n_jobs=fits):
        return grid.fit((images / 16).astype(np.float32), labels)


def main(_: list[str]) -> None:
    """Searches on the cluster, then in this process, and prints both scores."""
    with ExitStack() as stack:
        cluster: Any = _SCHEDULER.value
        if cluster is None:
            dask_workers = _WORKERS.value * _FITS.value
            cluster = stack.enter_context(LocalCluster(n_workers=dask_workers, threads_per_worker=1))
        stack.enter_context(Client(cluster))
        on_cluster = search(_WORKERS.value, _FITS.value).cv_results_
    in_process = search(0).cv_results_
    for index, params in enumerate(in_process["params"]):
        scores = [results["mean_test_accuracy"][index] for results in (on_cluster, in_process)]
        print(f"{params}: accuracy {scores[0]:.2%} on Dask, {scores[1]:.2%} in one process".replace("%", " %"))
    scores_of_folds = [name for name in in_process if name.startswith("split")]
    difference = max(np.max(np.abs(on_cluster[name] - in_process[name])) for name in scores_of_folds)
    print(f"largest difference of a score: {difference:.0e}")


if __name__ == "__main__":
    app.run(main)
