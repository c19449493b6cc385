"""The update of replicas that hold whole gradients, accumulators and weights, by Keras' own methods."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReductionContext
from tfdist.compression.gradient_tensors import all_finite, divided, with_shape, zeros_unless
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas
from tfdist.tensorflow_internals.shared_operations import shared_operations


class WholeUpdate:
    """The `HeldUpdate` of one optimizer on one replica, in the replica context.

    Clipping is Keras' own, so that it equals that of one process to the bit, and that users can override it.
    """

    is_whole = True
    exchanges_micro_steps = False

    def __init__(self, update: OptimizerUpdate, context: ReductionContext, compiles: bool | None) -> None:
        """Updates variables that have a gradient. For `compiles` see `OptimizerUpdate.clip_and_apply`."""
        self.update, self._context, self._compiles = update, context, compiles

    @property
    def accumulators(self) -> Sequence[tf.Variable]:
        """See `HeldUpdate`."""
        return self.update.accumulators

    def exchange(self, gradients: Sequence[Any], divisor: Any, contributes: tf.Tensor | None) -> list[Any]:
        """See `HeldUpdate`."""
        if contributes is not None and tf.executing_eagerly():
            # Eager replicas reduce in a merge call, where a replica's own condition is not known.
            gradients, contributes = [zeros_unless(contributes, gradient) for gradient in gradients], None
        if divisor is not None:
            gradients = [divided(gradient, divisor) for gradient in gradients]
        gradients = [
            with_shape(local_gradient, shape)
            for local_gradient, shape in zip(gradients, self.update.shapes, strict=True)
        ]
        with self._context.of_gradients(contributes, self.update.paths), shared_operations():
            return self._summed(gradients)

    def each(self, function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        """See `HeldUpdate`."""
        return [function(*of_one) for of_one in zip(*values, strict=True)]

    def write(self, function: Callable[..., Any], *values: Sequence[Any]) -> None:
        """See `HeldUpdate`."""
        update = self.update.strategy.extended.update
        for accumulator, *of_one in zip(self.accumulators, *values, strict=True):
            update(accumulator, function, args=tuple(of_one), group=False)

    def all_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        """See `HeldUpdate`. Sums are bit-identical on all replicas, so this is known without an exchange."""
        return all_finite(gradients)

    def clip_and_apply(self, gradients: Sequence[Any]) -> None:
        """See `HeldUpdate`."""
        self.update.clip_and_apply(gradients, self._compiles)

    def _summed(self, gradients: Sequence[Any]) -> list[Any]:
        return sum_over_replicas(gradients)
