"""Patches for training that a chief schedules on workers: functions of `fit`, metrics, optimizers, gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, TFOptimizer
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of

_ATTRIBUTE = "_tfdist_scheduled_training"
_stock_result = TensorFlowTrainer.get_metrics_result


def training_of(model: Any, make: Callable[[Any], Any] | None = None) -> Any:
    """Returns the result of the first `make(model)`, which trains the model for its strategy; `None` before it."""
    training = getattr(model, _ATTRIBUTE, None)
    if training is None and make is not None:
        training = make(model)
        object.__setattr__(model, _ATTRIBUTE, training)  # bypasses Keras' tracking of attributes
    return training


def set_server_state(model: Any, optimizer: Any, positions: tf.Variable) -> None:
    """Keeps the state of the servers of federated averaging in the model.

    It is saved and restored with the training, not with the model.
    """
    for name, value in (("optimizer", optimizer), ("positions", positions)):
        object.__setattr__(model, f"_tfdist_server_{name}", value)  # bypasses Keras' tracking of attributes


def metrics_result(model: Any) -> dict[str, Any]:
    """Returns the results of the model's metrics, from the values of their variables in the present scope."""
    return dict(_stock_result(model))


@patch
def patch_trainer() -> None:
    """Makes models use the functions `train`, `test` and `predict` of the object that trains them, if there is one.

    Its `begin` is called where Keras resets the metrics, `wait` where Keras reads them, `forget` when the model has
    been compiled again. `patch_loops_over_epochs` calls its `logs_of_all_steps` at the end of an epoch.
    """
    stock = TensorFlowTrainer
    result, reset = stock.get_metrics_result, stock.reset_metrics

    def replace_make(name: str) -> None:
        make_stock = getattr(stock, f"make_{name}_function")

        @replace(stock, f"make_{name}_function")
        def make_function(self: Any, force: bool = False) -> Any:
            hooks = hooks_of(self.distribute_strategy)
            make = hooks.training
            if make is None:
                earlier = getattr(self, f"{name}_function")
                if earlier is not None and not force:
                    return earlier
                make_stock(self, force)
                function = getattr(self, f"{name}_function")
                function = hooks.step_function(self.distribute_strategy, self, name, function)
                setattr(self, f"{name}_function", function)
                return function
            training = training_of(self, make)
            if getattr(self, f"{name}_function") is None or force:
                training.forget(name)
            function = getattr(training, name)
            setattr(self, f"{name}_function", function)
            return function

    for name in ("train", "test", "predict"):
        replace_make(name)

    @replace(stock, "get_metrics_result")
    def result_of_all(self: Any) -> Any:
        training = training_of(self)
        if training is not None and tf.executing_eagerly():
            training.wait()
        return result(self)

    @replace(stock, "reset_metrics")
    def reset_all(self: Any) -> Any:
        training = training_of(self)
        if training is not None:
            training.begin()
        return reset(self)


def update_counter(optimizer: Any) -> tf.Variable:
    """Returns the variable that counts the updates of an optimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations.value


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.path.endswith("seed_generator_state") and variable.shape.as_list() == [2]


@dataclass(frozen=True)
class EncodedGradient:
    """An encoded gradient: its `tensors`, and the function that decodes them on the device of the variable."""

    tensors: list[tf.Tensor]
    decode: Callable[[Sequence[tf.Tensor]], Any]


@patch
def patch_optimizer_update_step() -> None:
    """Makes optimizers accept `EncodedGradient`s, which are decoded on the device of their variable."""
    stock = TFOptimizer._distributed_tf_update_step

    @replace(TFOptimizer, "_distributed_tf_update_step")
    def update_where_decoded(self: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        pairs = list(grads_and_vars)
        if not any(isinstance(gradient, EncodedGradient) for gradient, _ in pairs):
            return stock(self, distribution, pairs, learning_rate)
        for gradient, variable in pairs:

            def update(variable: Any, rate: Any, *tensors: tf.Tensor, encoded: EncodedGradient = gradient) -> None:
                self.update_step(encoded.decode(tensors), variable, rate)

            distribution.extended.update(variable, update, args=(learning_rate, *gradient.tensors), group=False)
        return None
