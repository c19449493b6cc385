"""Warns of functions that use variables where they were before these were moved to the devices of their stages."""

import gc
import warnings
import weakref
from typing import Any

import keras
import tensorflow as tf


class MovedVariables:
    """Variables that one placement has moved. Each is a new `tf.Variable` afterwards."""

    def __init__(self) -> None:
        self._earlier: list[tuple[str, weakref.ref[Any]]] = []

    def add(self, variable: keras.Variable, earlier: tf.Variable) -> None:
        """Notes that another `tf.Variable` than `earlier` will hold `variable`."""
        self._earlier.append((variable.path, weakref.ref(earlier.handle)))

    def warn_if_used(self) -> None:
        """Warns if something has kept an earlier `tf.Variable`, as a traced function does, once for all of them."""
        if self._kept():
            gc.collect()  # of graphs in which Keras has computed shapes
        kept = self._kept()
        if kept:
            warnings.warn(
                "A function that was traced before the first step in stages keeps the earlier values of weights, "
                f"because that step has moved them to the devices of their stages. Received: {len(kept)} such "
                f"variables, the first of them {kept[0]!r}, that a `tf.function` or a reference to a `tf.Variable` "
                "uses. Expected: functions that are traced after the first `fit`, `evaluate` or `predict`. Call "
                "`predict` on a batch before them, and read `variable.value` each time.",
                stacklevel=2,
            )

    def _kept(self) -> list[str]:
        return [path for path, handle in self._earlier if handle() is not None]
