"""Moving averages of weights that are split over the replicas: what Keras copies between weights and averages."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TFOptimizer
from tfdist.private_symbols import private

for _path, _why in {
    "keras.src.callbacks.swap_ema_weights:SwapEMAWeights._tf_swap_variables": "adds to a `tf.Variable` of the average",
    "keras.src.callbacks.swap_ema_weights:SwapEMAWeights._tf_finalize_ema_values": "assigns to it",
}.items():
    private(_path, _why)


def patch_sharded_averages(is_split: Callable[[Any], bool]) -> None:
    """Makes Keras copy whole averages, gathered from all workers, where it copies between weights and averages.

    Args:
        is_split: Whether the averages of an optimizer are split.
    """
    callback = keras.callbacks.SwapEMAWeights

    def unless_split(owner: Any, name: str, copy: Callable[[Any, Any], None]) -> None:
        stock = getattr(owner, name)

        @functools.wraps(stock)
        def copy_all(self: Any, argument: Any) -> Any:
            optimizer = self if owner is TFOptimizer else argument
            if not is_split(optimizer):
                return stock(self, argument)
            variables = argument if owner is TFOptimizer else optimizer._trainable_variables
            averages = optimizer._model_variables_moving_average
            for variable in variables:  # without those that were frozen, with those of other optimizers
                position = optimizer._trainable_variables_indices.get(optimizer._var_key(variable))
                average = None if position is None else averages[position]
                if average is not None:
                    copy(variable, average)
            return None

        setattr(owner, name, copy_all)

    unless_split(TFOptimizer, "_overwrite_model_variables_with_average_value", _overwrite)
    unless_split(callback, "_tf_swap_variables", _swap)
    unless_split(callback, "_tf_finalize_ema_values", _keep)


def _overwrite(variable: Any, average: Any) -> None:
    variable.assign(average.read_value())


def _swap(variable: Any, average: Any) -> None:
    weight = tf.identity(variable)
    variable.assign(average.read_value())
    average.assign(weight)


def _keep(variable: Any, average: Any) -> None:
    average.assign(tf.identity(variable))
