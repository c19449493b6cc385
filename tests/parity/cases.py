"""Programs that must compute the same on N replicas as in one process on the concatenated batch.

Each case is a function of a strategy that trains something and returns what must be equal: weights, logs,
evaluations, predictions. Its reference is the same function without a strategy unless it says otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Outcome = dict[str, Any]

SAMPLES, FEATURES, CLASSES = 64, 10, 4
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(SAMPLES, FEATURES)).astype("float32")
LABELS = _random.integers(0, CLASSES, size=SAMPLES)
TARGETS = _random.normal(size=(SAMPLES, 1)).astype("float32")


@dataclass(frozen=True)
class Case:
    """A program and what it must equal."""

    name: str
    run: Callable[[tf.distribute.Strategy], Outcome]
    reference: Callable[[tf.distribute.Strategy], Outcome]
    workers_only: bool = False
    reference_is_shared: bool = True
    reference_is_traced: bool = False


CASES: dict[str, Case] = {}


def case(
    reference: Callable[[tf.distribute.Strategy], Outcome] | None = None,
    *,
    workers_only: bool = False,
    reference_is_shared: bool = True,
    reference_is_traced: bool = False,
) -> Callable[[Callable[[tf.distribute.Strategy], Outcome]], Callable[[tf.distribute.Strategy], Outcome]]:
    """Registers a program as a case under its function's name.

    Args:
      reference: the program that one process runs; the case's own by default.
      workers_only: whether the case is about workers.
      reference_is_shared: whether one outcome of the reference serves all shapes of a cluster.
      reference_is_traced: whether the reference must run in graphs: it takes longer than eagerly.
    """

    def register(run: Callable[[tf.distribute.Strategy], Outcome]) -> Callable[[tf.distribute.Strategy], Outcome]:
        kinds = (workers_only, reference_is_shared, reference_is_traced)
        CASES[run.__name__] = Case(run.__name__, run, reference or run, *kinds)
        return run

    return register


def dataset(batch_size: int = 16, *columns: Any) -> tf.data.Dataset:
    """The samples, or the given columns, in batches of the global batch size."""
    return tf.data.Dataset.from_tensor_slices(columns or (INPUTS, LABELS)).batch(batch_size)


def _one_hidden_layer() -> list[keras.layers.Layer]:
    return [keras.layers.Dense(16, activation="relu")]


def classifier(hidden: Callable[[], list[keras.layers.Layer]] = _one_hidden_layer) -> keras.Model:
    """A small network, always with the same initial weights (a layer draws its seed when it is made)."""
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((FEATURES,)), *hidden(), keras.layers.Dense(CLASSES)])


def cross_entropy(**arguments: Any) -> keras.losses.Loss:
    """The loss of the classifier."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def fitted(
    strategy: tf.distribute.Strategy,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    *,
    model: Callable[[], keras.Model] = classifier,
    data: tf.data.Dataset | None = None,
    loss: Callable[[], Any] = cross_entropy,
    metrics: Callable[[], Any] = lambda: ["accuracy"],
    epochs: int = 2,
    fit: dict[str, Any] | None = None,
    **compile_arguments: Any,
) -> Outcome:
    """Trains and returns the weights and the logs of every epoch."""
    with strategy.scope():
        built = model()
        compile_arguments = {"metrics": metrics(), **compile_arguments}
        built.compile(optimizer(), loss=loss(), **compile_arguments)
    fit = {"x": dataset() if data is None else data, **(fit or {})}
    history = built.fit(epochs=epochs, verbose=0, **fit)
    return {"weights": built.get_weights(), "logs": history.history}
