"""Registers cases that the chief of a cluster runs, and compares them with one process.

A case is a function of a folder that returns what the test checks. Each case creates its strategies; all strategies of
the chief's process share its cluster.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from comparison import largest_difference

Outcome = dict[str, Any]
Program = Callable[[Any], Outcome]

CASES: dict[str, Callable[[Path], Outcome]] = {}

# The cases of tests/parity that run under parameter servers: those that no case here contains.
PARITY = (
    "batch_logs compute_loss_of_the_users_own embedding_with_global_clipnorm everything_on_arrays "
    "masked_sequences on_batch_methods steps_per_execution texts two_optimizers_in_a_step"
).split()
# Contained in the case `optimizer_features`, which fails if one of them does.
LONG_PARITY = "constraints ema loss_scale weight_decay".split()

SAMPLES, FEATURES = 203, 6
_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(SAMPLES, FEATURES)).astype("float32")
LABELS = (INPUTS.sum(1) > 0).astype("int64") + (INPUTS[:, 0] > 1)


def case(function: Callable[[Path], Outcome]) -> Callable[[Path], Outcome]:
    """Registers a case by its function's name."""
    CASES[function.__name__] = function
    return function


def compared(name: str, make: Callable[[], Any], program: Program, reference: Program | None = None) -> None:
    """Registers a case that returns how far `program` under the strategy of `make` is from one process."""

    def run(_: Path) -> Outcome:
        outcome = program(make())
        return {"difference": largest_difference(outcome, (reference or program)(tf.distribute.get_strategy()))}

    CASES[name] = run


def classifier() -> keras.Model:
    """A small network, always with the same initial weights."""
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])


def compiled(
    strategy: Any,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    model: Callable[[], keras.Model] = classifier,
    **arguments: Any,
) -> keras.Model:
    """The model, compiled in the strategy's scope."""
    with strategy.scope():
        built = model()
        loss = arguments.pop("loss", None) or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = arguments.pop("metrics", None)
        built.compile(optimizer(), loss=loss, metrics=metrics() if metrics else ["accuracy"], **arguments)
    return built
