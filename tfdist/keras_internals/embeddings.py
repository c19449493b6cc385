"""Embedding layers that pull the rows they look up, not the table, and whose table may lie on several servers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.symbols import Embedding

Lookup = Callable[[Sequence[keras.Variable], tf.Tensor], tf.Tensor | None]


def install_tables(look_up: Lookup, parts_of: Callable[[tuple[int, int]], int]) -> None:
    """Makes embedding layers look rows up by `look_up`, and split their tables.

    Keras makes a tensor of the whole table first, of which a worker of a parameter server strategy then pulls a copy
    in every step. A table in parts is saved as the one that it is, in one piece.

    Args:
      look_up: takes the parts of a table and ids; returns the rows, or `None`: then Keras looks them up as ever.
      parts_of: takes the shape of a table that is made; returns in how many parts, by rows, it shall lie.
    """
    stock_build, stock_call, stock_load = Embedding.build, Embedding.call, Embedding.load_own_variables
    stock_table = Embedding.embeddings.fget

    @functools.wraps(stock_build)
    def build(self: Any, input_shape: Any = None) -> None:
        plain = not self.lora_rank and self.quantization_mode is None
        parts = parts_of((self.input_dim, self.output_dim)) if plain and not self.built else 1
        if parts == 1:
            return stock_build(self, input_shape)
        shape = (self.input_dim, self.output_dim)
        # Drawn as one, so that it is what one process draws.
        value = self.embeddings_initializer(shape, dtype=self.variable_dtype)
        sizes = part_sizes(self.input_dim, parts)
        starts = [sum(sizes[:number]) for number in range(parts)]
        self._parts_of_table = [
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

    @functools.wraps(stock_call)
    def call(self: Any, inputs: Any) -> Any:
        parts = getattr(self, "_parts_of_table", None) or [getattr(self, "_embeddings", None)]
        if self.lora_enabled or self.quantization_mode is not None or not isinstance(inputs, tf.Tensor):
            return stock_call(self, inputs)
        found = look_up(parts, inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32))
        return stock_call(self, inputs) if found is None else keras.ops.cast(found, self.compute_dtype)

    def table(self: Any) -> Any:
        parts = getattr(self, "_parts_of_table", None)
        return keras.ops.concatenate([part.value for part in parts], 0) if parts else stock_table(self)

    @functools.wraps(stock_load)
    def load_own_variables(self: Any, store: Any) -> None:
        parts = getattr(self, "_parts_of_table", None)
        if not parts:
            return stock_load(self, store)
        start = 0
        for part in parts:
            part.assign(store["0"][start : start + part.shape[0]])
            start += part.shape[0]
        return None

    Embedding.build, Embedding.call, Embedding.load_own_variables = build, call, load_own_variables
    Embedding.embeddings = property(table, doc=Embedding.embeddings.__doc__)


def part_sizes(rows: int, parts: int) -> list[int]:
    """The rows of each part, as even as possible.

    >>> part_sizes(10, 4)
    [3, 3, 2, 2]
    """
    return [rows // parts + (number < rows % parts) for number in range(parts)]
