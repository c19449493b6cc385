"""Calls of a function of `fit` with single batches, without what TensorFlow does in Python before each call."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.model_introspection import compiled_step
from tfdist.tensorflow_internals.rows_per_replica import RowsPerReplica

_CALLS_THAT_TRACE = 2
_Key = tuple[Any, ...]


class BatchCalls:
    """Runs a step of Keras on a batch.

    To find the graph for a batch takes TensorFlow 0.3 ms, most of it for values that are not plain tensors. A step of
    few milliseconds notices that. So after two calls with tensors of the same shapes their graph is called.

    Args:
        function: What Keras' `make_train_function` or `make_test_function` has made.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function, self._compiled = function, compiled_step(function)
        self._calls: dict[_Key, int] = {}
        self._graphs: dict[_Key, Any] = {}

    def __call__(self, batch: Any) -> Any:
        """Returns what the step returns."""
        tensors = _tensors_of(batch)
        if tensors is None or self._compiled is None or tf.config.functions_run_eagerly():
            return self._function(iter([batch]))
        key = (len(batch), *[(tensor.dtype, *tensor.shape) for tensor in tensors])
        if (graph := self._graphs.get(key)) is not None:
            return graph._call_flat(tensors, graph.captured_inputs)
        result = self._function(iter([batch]))
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] == _CALLS_THAT_TRACE:
            self._graphs[key] = self._compiled.get_concrete_function(batch)
        return result


def _tensors_of(batch: Any) -> list[tf.Tensor] | None:
    """Returns the tensors of a tuple of complete batches; `None` for other structures."""
    if type(batch) is not tuple or not all(type(part) is RowsPerReplica and part.is_complete for part in batch):
        return None
    tensors = [value for part in batch for value in part.values]
    return tensors if all(map(tf.is_tensor, tensors)) else None
