"""Warns of functions that use variables where they were before these were moved to the devices of their stages."""

import gc
import warnings
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import SHAPE_GRAPH
from tfdist.tensorflow_internals.captured_tensors import captured_handles


class MovedVariables:
    """Variables that one placement has moved. Each is a new `tf.Variable` afterwards."""

    def __init__(self) -> None:
        self._earlier: list[tuple[str, weakref.ref[Any], weakref.ref[Any]]] = []

    def add(self, variable: keras.Variable, *earlier: tf.Variable) -> None:
        """Notes that other `tf.Variable`s than `earlier` will hold `variable`."""
        self._earlier += [(variable.path, weakref.ref(one), weakref.ref(one.handle)) for one in earlier]

    def warn_if_used(self) -> None:
        """Warns if something has kept an earlier `tf.Variable`, as a traced function does, once for all of them."""
        if not self._alive():
            return
        gc.collect()
        # Not of the graphs in which Keras has computed shapes: a layer's own gradients keep them.
        captured = captured_handles(ignored=SHAPE_GRAPH) if self._alive() else set()
        kept = [path for path, variable, handle in self._alive() if variable() is not None or id(handle()) in captured]
        if kept:
            warnings.warn(
                "A function that was traced before the first step in stages keeps the earlier values of weights, "
                f"because that step has moved them to the devices of their stages. Received: {len(kept)} such "
                f"variables, the first of them {kept[0]!r}, that a `tf.function` or a reference to a `tf.Variable` "
                "uses. Expected: functions that are traced after the first `fit`, `evaluate` or `predict`. Call "
                "`predict` on a batch before them, and read `variable.value` each time.",
                stacklevel=2,
            )

    def _alive(self) -> list[tuple[str, weakref.ref[Any], weakref.ref[Any]]]:
        return [one for one in self._earlier if one[2]() is not None]
