"""Scales the losses of a part so that all parts of a push or a round together give the loss of the complete batch.

The gradients of the parts are averaged by samples: part p, of n_p samples, has the weight n_p / N. That is correct for
a mean over the samples. A loss that is a sum must be multiplied by N / n_p beforehand. A mean may also divide by
another *normalizer*, such as the number of valid entries of a mask or the sum of weights: d_p in the part, D in the
batch. It must be multiplied by d_p / D * N / n_p. A part does not know D, so the chief computes it from the batch's
masks and weights and sends it to the workers.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.losses.loss_scaling import LossStep
from tfdist.losses.pruned_function import PrunedFunction
from tfdist.parameter_server.worker_scope import WorkerScope
from tfdist.tensorflow_internals.xla_functions import inlined
from tfdist.utils.temporary_values import setting_attributes


class _Step(LossStep):
    """How the losses of a step are scaled. The gradients of parts are averaged, so a scaled loss is a mean."""

    scaled_degree = 0
    mean_scale = 1  # what Keras divides by the number of replicas stays as it is

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()

    @property
    def weight(self) -> Any:
        """The fraction of the samples of the batch in this part."""
        return 1 if not tf.is_tensor(self.sum_scale) else 1 / self.sum_scale

    def share_of(self, divisor: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """Encloses the computation of a mean that divides by `divisor`, a float32 scalar.

        Inside a condition, a loop or a nested function the normalizer cannot be computed beforehand: there the mean
        counts as one over the samples.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            return contextlib.nullcontext()
        return setting_attributes(self, fraction=self._fraction_of(tf.stop_gradient(divisor)))

    def _fraction_of(self, normalizer: tf.Tensor) -> Any:
        raise NotImplementedError


class MicroStep(_Step):
    """Scales the losses of a micro-step of a part.

    Attributes:
        num_normalizers: How many means with a normalizer other than the number of samples were taken so far.
    """

    def __init__(self, sum_scale: Any = 1, normalizers: Sequence[tf.Tensor] = ()) -> None:
        """Creates the scaling.

        `sum_scale` is the number of samples of all parts divided by those of this micro-step, a float64 scalar; or 1.
        `normalizers` are over all parts, in the order in which the means are taken. A mean beyond the last one counts
        as one over the samples.
        """
        super().__init__()
        self.sum_scale = sum_scale
        self.num_normalizers = 0
        self._normalizers = normalizers

    def _fraction_of(self, normalizer: tf.Tensor) -> Any:
        self.num_normalizers += 1
        if self.num_normalizers > len(self._normalizers):
            return 1
        total = self._normalizers[self.num_normalizers - 1]
        return tf.math.divide_no_nan(tf.cast(normalizer, total.dtype), total) * self.sum_scale


class AllRecorded(BaseException):
    """Ends a recorded step. A `BaseException`, so that no `except Exception` of a model catches it."""


class Recording(_Step):
    """Records the normalizers of a step.

    Attributes:
        normalizers: The normalizers that the step has used so far.
    """

    def __init__(self, number: int) -> None:
        """Records `number` normalizers, and raises `AllRecorded` at the last one."""
        super().__init__()
        self.normalizers: list[tf.Tensor] = []
        self._number = number

    def _fraction_of(self, normalizer: tf.Tensor) -> Any:
        self.normalizers.append(normalizer)
        if len(self.normalizers) == self._number:
            raise AllRecorded
        return 1


class LossNormalizers:
    """Computes the normalizers of a batch on the chief from its masks and weights alone.

    The model's step is traced up to its losses, and the trace is pruned to what the normalizers need. For an
    `Embedding` with `mask_zero=True` that is the comparison of ids with zero, without the table and without any layer.
    """

    def __init__(self, model: keras.Model, strategy: Any) -> None:
        """Creates the functions' cache; `model` must be compiled and built when `of` is called."""
        self._model, self._strategy = model, strategy
        self._functions: dict[Any, PrunedFunction] = {}

    def of(self, batches: Sequence[Any], number: int) -> list[float]:
        """Returns the normalizers of a step on all rows of `batches`, in the order in which the losses use them."""
        return np.sum([self._of_batch(batch, number) for batch in batches], axis=0).tolist()

    def _of_batch(self, batch: Any, number: int) -> np.ndarray:
        batch = tf.nest.map_structure(_tensor, batch)
        leaves = tf.nest.flatten(batch, expand_composites=True)
        key = (number, *(None if leaf is None else (leaf.dtype, *leaf.shape[1:]) for leaf in leaves))
        if key not in self._functions:
            self._functions[key] = self.function(batch, number)
        return self._functions[key](*[leaf for leaf in leaves if leaf is not None]).numpy()

    def function(self, batch: Any, number: int) -> PrunedFunction:
        """Returns a function of a batch like `batch`, with any number of rows, that returns a float64 vector."""
        step = tf.function(lambda batch: self._normalizers(batch, number), autograph=False)
        with self._strategy.scope():
            return PrunedFunction(step.get_concrete_function(tf.nest.map_structure(_spec, batch)))

    def _normalizers(self, batch: Any, number: int) -> tf.Tensor:
        recording = Recording(number)

        def run() -> None:
            scope = WorkerScope(self._model.metrics_variables, tf.constant(0, tf.int64), None)
            with contextlib.suppress(AllRecorded), scope.step(recording):
                inlined(self._model.train_step)(batch)

        self._strategy.run(run)
        if len(recording.normalizers) < number:
            raise RuntimeError(
                "A step takes other losses on a complete batch than on a part of it. Received: "
                f"{len(recording.normalizers)} masked or weighted means for the complete batch. Expected: {number}, as "
                "for a part. Let `train_step` take the same losses whatever the number of samples."
            )
        return tf.cast(tf.stack(recording.normalizers), tf.float64)


def _tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    return leaf if isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) else tf.convert_to_tensor(leaf)


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    spec = tf.type_spec_from_value(leaf)
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) if isinstance(spec, tf.TensorSpec) else spec
