"""Embedding layers that pull only the rows they look up, and whose table may be sharded over several servers."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of


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
