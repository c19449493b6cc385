"""The divisors of a whole batch that its parts cannot know: the valid entries of masks, the sums of weights."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.loss_step import AllRecorded, Recording
from tfdist.parameter_server.pruned import Pruned
from tfdist.parameter_server.worker_scope import WorkerScope


class OwnDivisors:
    """Computes on the chief what the means of a step divide by, of the batch's mask and weights alone.

    The model's step is traced up to its losses, and of the trace is kept what the divisors need: of an `Embedding` with
    `mask_zero=True` the comparison of ids with zero, and neither the table nor any layer.
    """

    def __init__(self, model: keras.Model, strategy: Any) -> None:
        """To be used when `model` is compiled and built."""
        self._model, self._strategy = model, strategy
        self._functions: dict[Any, Pruned] = {}

    def of(self, batches: Sequence[Any], number: int) -> list[float]:
        """The divisors of a step on all rows of `batches`.

        Args:
          batches: of any sizes: inputs, targets, weights, as `train_step` takes them.
          number: how many divisors a step has.

        Returns:
          So many, in the order in which the losses use them.

        Raises:
          RuntimeError: the step on a whole batch has fewer.
        """
        return np.sum([self._of_batch(batch, number) for batch in batches], axis=0).tolist()

    def _of_batch(self, batch: Any, number: int) -> np.ndarray:
        batch = tf.nest.map_structure(_tensor, batch)
        leaves = tf.nest.flatten(batch, expand_composites=True)
        key = (number, *(None if leaf is None else (leaf.dtype, *leaf.shape[1:]) for leaf in leaves))
        if key not in self._functions:
            self._functions[key] = self.function(batch, number)
        return self._functions[key](*[leaf for leaf in leaves if leaf is not None]).numpy()

    def function(self, batch: Any, number: int) -> Pruned:
        """What computes `number` divisors, a float64 vector, of a batch like `batch` of any number of rows."""
        step = tf.function(lambda batch: self._divisors(batch, number), autograph=False)
        with self._strategy.scope():
            return Pruned(step.get_concrete_function(tf.nest.map_structure(_spec, batch)))

    def _divisors(self, batch: Any, number: int) -> tf.Tensor:
        recording = Recording(number)

        def run() -> None:
            scope = WorkerScope(self._model.metrics_variables, tf.constant(0, tf.int64), None)
            with contextlib.suppress(AllRecorded), scope.step(recording):
                self._model.train_step(batch)

        self._strategy.run(run)
        if len(recording.divisors) < number:
            raise RuntimeError(
                "The losses of a step on a whole batch are not those on a part of it. Received: "
                f"{len(recording.divisors)} masked or weighted means for the whole batch. Expected: {number}, as for a "
                "part. Let `train_step` take the same losses whatever the number of samples."
            )
        return tf.cast(tf.stack(recording.divisors), tf.float64)


def _tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return leaf if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) else tf.convert_to_tensor(leaf)


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) if isinstance(spec, tf.TensorSpec) else spec
