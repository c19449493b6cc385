"""Where Keras asks for the functions of `fit`, `evaluate` and `predict`, and for the metrics that they count."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.symbols import trainer

_ATTRIBUTE = "_tfdist_scheduled_training"
_stock_result = trainer.TensorFlowTrainer.get_metrics_result


def training_of(model: Any, make: Callable[[Any], Any] | None = None) -> Any:
    """What trains `model` for its strategy: what `make` made of the model the first time, or `None` without it."""
    training = getattr(model, _ATTRIBUTE, None)
    if training is None and make is not None:
        training = make(model)
        object.__setattr__(model, _ATTRIBUTE, training)  # past Keras, which tracks attributes
    return training


def metrics_result(model: Any) -> dict[str, Any]:
    """The results of the model's metrics, of the values that their variables have in the present scope."""
    return dict(_stock_result(model))


def install_scheduled_training(is_ours: Callable[[Any], bool], make: Callable[[Any], Any]) -> None:
    """Gives models whose strategy `is_ours` the functions of `make(model)`: `train`, `test`, `predict`.

    `begin` of it is called where Keras resets the metrics, `wait` where Keras reads them, `forget` when the model has
    been compiled anew.
    """
    stock = trainer.TensorFlowTrainer
    make_functions = {name: getattr(stock, f"make_{name}_function") for name in ("train", "test", "predict")}
    result, reset = stock.get_metrics_result, stock.reset_metrics

    def replaced(name: str) -> Callable[..., Any]:
        @functools.wraps(make_functions[name])
        def make_function(self: Any, force: bool = False) -> Any:
            if not is_ours(self.distribute_strategy):
                return make_functions[name](self, force)
            training = training_of(self, make)
            if getattr(self, f"{name}_function") is None or force:
                training.forget(name)
            function = getattr(training, name)
            setattr(self, f"{name}_function", function)
            return function

        return make_function

    for name in make_functions:
        setattr(stock, f"make_{name}_function", replaced(name))

    @functools.wraps(result)
    def result_of_all(self: Any) -> Any:
        training = training_of(self)
        if training is not None and tf.executing_eagerly():
            training.wait()
        return result(self)

    @functools.wraps(reset)
    def reset_all(self: Any) -> Any:
        training = training_of(self)
        if training is not None:
            training.begin()
        return reset(self)

    stock.get_metrics_result = result_of_all
    stock.reset_metrics = reset_all


def build_elsewhere(optimizer: Any, variables: list[Any]) -> None:
    """Builds an optimizer while a step is traced in a stateless scope, where it would get no variables."""

    def build() -> None:
        with optimizer._distribution_strategy.scope(), keras.name_scope(optimizer.name):
            optimizer.build(variables)
        optimizer.built = True

    # A thread of its own is in no scope, in no replica's context, and traces nothing.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(build).result()


def count_of_updates(optimizer: Any) -> tf.Variable:
    """The variable that counts the updates of an optimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations.value


def server_variable(variable: keras.Variable) -> tf.Variable:
    """What holds the value of a Keras variable, whatever scope is active."""
    return variable._value


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.path.endswith("seed_generator_state") and variable.shape.as_list() == [2]
