"""Keras models, as a step over replicas sees them."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.symbols import trainer, tree


def bound_step(function: Any) -> tuple[Any, str] | tuple[None, None]:
    """The model and the name, `train_step` or `test_step`, of which `function` is the bound method."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, keras.Model) and name in ("train_step", "test_step"):
        return owner, name
    return None, None


def is_predict_step(function: Any) -> bool:
    """Whether `function` is what Keras runs on the replicas to predict a batch."""
    return "make_predict_function.<locals>.one_step_on_data" in getattr(function, "__qualname__", "")


def install_predict_on_batch(is_ours: Callable[[Any], bool], shared_out: Callable[[Any, Any], Any]) -> None:
    """Makes `predict_on_batch` predict every row once; Keras has every replica predict all of them.

    Args:
      is_ours: whether a strategy is one of tfdist's.
      shared_out: called with a strategy and the input; returns the input with its rows shared out over the replicas.
    """
    predict = trainer.TensorFlowTrainer.predict_on_batch

    @functools.wraps(predict)
    def predict_rows_once(self: Any, x: Any) -> Any:
        strategy = self.distribute_strategy
        return predict(self, shared_out(strategy, x) if is_ours(strategy) else x)

    trainer.TensorFlowTrainer.predict_on_batch = predict_rows_once


def first_input(data: Any) -> Any:
    """The input whose first dimension Keras takes for the number of samples, or `None`."""
    inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
    return next((leaf for leaf in tree.flatten(inputs) if leaf is not None), None)


def metric_variables(model: Any) -> list[keras.Variable]:
    """The variables of the model's metrics that are summed over the replicas when they are read."""
    return [variable for variable in model.metrics_variables if variable.aggregation == "sum"]


def batch_statistics(model: Any) -> list[keras.Variable]:
    """The moving means and variances that batch normalization layers keep of their own replica's batches."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    own = [layer for layer in layers if layer.trainable and layer.built and not layer.synchronized]
    return [variable for layer in own for variable in (layer.moving_mean, layer.moving_variance)]


def step_states(model: Any) -> list[keras.Variable]:
    """What the model's layers change in a step beside weights and sums: statistics, counts, seeds."""
    found: dict[int, keras.Variable] = {}
    for layer in model._flatten_layers():
        seeds = [generator.state for generator in layer._seed_generators]
        for variable in [*layer._non_trainable_variables, *seeds]:
            if variable.aggregation != "sum":
                found[id(variable)] = variable
    for metric in model.metrics:
        for variable in metric.variables:
            found.pop(id(variable), None)
    return list(found.values())


def computes_over_all_replicas(model: Any) -> bool:
    """Whether a layer of the model uses the samples of all replicas: synchronized batch normalization."""
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())


def first_variable_outside(model: Any) -> keras.Variable | None:
    """The first variable of the model or its metrics that no strategy has distributed, if there is one."""
    variables = [*model.variables, *model.metrics_variables]
    return next((v for v in variables if not isinstance(v.value, tf.distribute.DistributedValues)), None)


def is_made_under(optimizer: Any, strategy: Any) -> bool:
    """Whether `optimizer` keeps its variables by `strategy`."""
    return getattr(optimizer, "_distribution_strategy", None) is strategy
