"""New states of compressors, which are stored only if all gradients of a step are finite."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.device_updates import doing


class StateWrites:
    """New values of variables on several devices."""

    def __init__(self) -> None:
        self._by_device: dict[str, list[tuple[tf.Variable, tf.Tensor, tf.Tensor | None]]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._by_device)

    def add(self, variable: tf.Variable, value: tf.Tensor, rows: tf.Tensor | None = None) -> None:
        """Adds the new `value` of a variable, or of the `rows` of it. Both are on the device of the variable."""
        self._by_device[variable.device].append((variable, value, rows))

    def apply(self, finite: tf.Tensor) -> None:
        """Assigns the values if the bool scalar `finite` is true. Only this scalar is sent to the devices."""
        for device, writes in self._by_device.items():
            variables, values, rows = (list(column) for column in zip(*writes, strict=True))
            with tf.device(device):
                _function(variables)(tf.identity(finite), values, rows)


def _function(variables: list[tf.Variable]) -> Callable[..., None]:
    def store(finite: tf.Tensor, values: list[tf.Tensor], rows: list[Any]) -> None:
        def assign() -> None:
            for variable, value, indices in zip(variables, values, rows, strict=True):
                if indices is None:
                    variable.assign(value)
                else:
                    variable.scatter_update(tf.IndexedSlices(value, indices))

        tf.cond(finite, doing(assign), doing(lambda: None))

    return tf.function(store, autograph=False, experimental_attributes={"_noinline": True})
