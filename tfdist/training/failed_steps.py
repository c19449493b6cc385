"""What follows an exception in a step: replicas of one process become equal again, workers cannot continue."""

import inspect
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.model_state import SEED, WEIGHT, OptimizerState, components, model_variables, optimizers_of
from tfdist.tensorflow_internals.aborted_collectives import record_failed_step


def recover_from(error: BaseException, models: Iterable[Any], strategy: Any) -> None:
    """Prepares the next `fit`, `evaluate` or `predict` after an exception has ended one.

    A step that fails on one replica cancels the others wherever they are. Some have then counted the step, or drawn its
    random numbers, and others have not.
    """
    if strategy.num_workers == 1:
        for model in models:
            for variable in _equal_variables(model):
                first, *other_copies = components(strategy, variable)
                for copy in other_copies:
                    copy.assign(first)
    elif isinstance(error, tf.errors.OpError) and not _is_of_callback(error):
        record_failed_step(error)


def _is_of_callback(error: BaseException) -> bool:
    """Whether a callback raised the error, such as that of a missing file, so that no step was interrupted."""
    callbacks = inspect.getfile(keras.callbacks.CallbackList)
    return any(frame.f_code.co_filename == callbacks for frame, _ in traceback.walk_tb(error.__traceback__))


def _equal_variables(model: Any) -> Iterator[Any]:
    """Yields the variables that are equal on all replicas between two steps."""
    yield from (
        model_variable.variable for model_variable in model_variables(model) if model_variable.kind in (WEIGHT, SEED)
    )
    for optimizer in optimizers_of(model):
        yield from OptimizerState(optimizer).variables
