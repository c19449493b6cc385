"""Embedding layers that pull the rows they look up, and not the table."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.symbols import Embedding

_installed = False


def install_row_lookup(rows: Callable[[keras.Variable, tf.Tensor], tf.Tensor | None]) -> None:
    """Makes embedding layers look rows up by `rows(table, ids)` where it returns any, else as ever.

    Keras makes a tensor of the whole table first, of which a worker of a parameter server strategy then pulls a copy
    in every step.
    """
    global _installed
    if _installed:
        return
    _installed = True
    call = Embedding.call

    @functools.wraps(call)
    def look_up(self: Any, inputs: Any) -> Any:
        table = getattr(self, "_embeddings", None)
        if self.lora_enabled or self.quantization_mode is not None or not isinstance(table, keras.Variable):
            return call(self, inputs)
        if not isinstance(inputs, tf.Tensor):
            return call(self, inputs)
        found = rows(table, inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32))
        return call(self, inputs) if found is None else keras.ops.cast(found, self.compute_dtype)

    Embedding.call = look_up
