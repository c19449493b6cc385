"""Patches for training that a chief schedules on workers: functions of `fit`, metrics, gradients, embedding tables."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, TFOptimizer
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of
from tfdist.utils.temporary_values import setting_attributes

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
                is_apart = name == "predict" and hooks.are_weights_apart(self.distribute_strategy)
                with setting_attributes(self, jit_compile=False) if is_apart else contextlib.nullcontext():
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
        strategy = self.distribute_strategy
        return hooks_of(strategy).read_metrics(strategy, lambda: result(self))

    @replace(stock, "reset_metrics")
    def reset_all(self: Any) -> Any:
        training = training_of(self)
        if training is not None:
            training.begin()
        strategy = self.distribute_strategy
        hooks_of(strategy).reset_metrics(strategy, self)
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


@patch
def patch_embedding_layers() -> None:
    """Makes embedding layers look up rows, and shard their tables, as the strategy in scope says.

    Keras converts the table to a tensor first, of which a worker of a parameter server strategy then pulls a copy in
    every step. A sharded table is saved in one piece, as an unsharded one.
    """
    stock_build, stock_call, stock_load = (
        keras.layers.Embedding.build,
        keras.layers.Embedding.call,
        keras.layers.Embedding.load_own_variables,
    )
    stock_table = keras.layers.Embedding.embeddings.fget

    @replace(keras.layers.Embedding, "build")
    def build(self: Any, input_shape: Any = None) -> None:
        plain = not self.lora_rank and self.quantization_mode is None
        shape, strategy = (self.input_dim, self.output_dim), tf.distribute.get_strategy()
        shards = hooks_of(strategy).num_shards(strategy, shape) if plain and not self.built else 1
        if shards == 1:
            return stock_build(self, input_shape)
        # Initialized as one table, so the values are those of one process.
        value = self.embeddings_initializer(shape, dtype=self.variable_dtype)
        sizes = shard_sizes(self.input_dim, shards)
        starts = [sum(sizes[:number]) for number in range(shards)]
        self._table_shards = [
            self.add_weight(
                shape=(size, self.output_dim),
                initializer=lambda *_, at=start, n=size, **__: value[at : at + n],
                name=f"embeddings_part_{number}",
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
                trainable=True,
            )
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        self.built = True
        return None

    @replace(keras.layers.Embedding, "call")
    def call(self: Any, inputs: Any) -> Any:
        look_up = hooks_of(tf.distribute.get_strategy()).look_up
        is_plain = not self.lora_enabled and self.quantization_mode is None and isinstance(inputs, tf.Tensor)
        if look_up is None or not is_plain:
            return stock_call(self, inputs)
        shards = getattr(self, "_table_shards", None) or [getattr(self, "_embeddings", None)]
        rows = look_up(shards, inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32))
        return stock_call(self, inputs) if rows is None else keras.ops.cast(rows, self.compute_dtype)

    def table(self: Any) -> Any:
        shards = getattr(self, "_table_shards", None)
        return keras.ops.concatenate([shard.value for shard in shards], 0) if shards else stock_table(self)

    @replace(keras.layers.Embedding, "load_own_variables")
    def load_own_variables(self: Any, store: Any) -> None:
        shards = getattr(self, "_table_shards", None)
        if not shards:
            return stock_load(self, store)
        start = 0
        for shard in shards:
            shard.assign(store["0"][start : start + shard.shape[0]])
            start += shard.shape[0]
        return None

    replace(keras.layers.Embedding, "embeddings")(property(table, doc=keras.layers.Embedding.embeddings.__doc__))


def shard_sizes(rows: int, shards: int) -> list[int]:
    """Returns the number of rows of each shard, as even as possible.

    >>> shard_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [rows // shards + (number < rows % shards) for number in range(shards)]
