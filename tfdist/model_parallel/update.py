"""One optimizer update of all columns: accumulate, unscale, clip, decay, apply and average, each on its device.

Only scalars leave the device of a variable: squares of norms, and whether gradients are finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.dynamic_loss_scale import LossScale
from tfdist.keras_internals.keras_updates import (
    averaged_variables,
    clip_by_norm,
    count_micro_step,
    positions_of_gradients,
)
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.placed_variables import held_variable, optimizers_of
from tfdist.keras_internals.whole_values import GATHERING
from tfdist.model_parallel.column_run import added
from tfdist.model_parallel.columns import Columns
from tfdist.model_parallel.device_updates import apply_by_device, average_by_device, doing
from tfdist.model_parallel.gathered_updates import update_by_gathering
from tfdist.model_parallel.lamb_of_shards import update_by_lamb


def loss_scale_of(optimizer: Any) -> tf.Tensor:
    """Returns the factor by which the optimizer scales the loss, a float32 scalar."""
    return tf.cast(optimizer.scale_loss(tf.ones([])), tf.float32)


def unscaling_of(optimizer: Any) -> Callable[[Any], Any]:
    """Returns the function that divides a gradient by the factor of the loss.

    Gradients are divided before they are compressed: residuals must not depend on a factor, which may change.
    """
    inner, outer = optimizers_of(optimizer)
    factor = inner.loss_scale_factor if outer is None else LossScale(outer).value
    if factor is None:
        return lambda gradient: gradient
    return lambda gradient: _times(gradient, 1.0 / tf.cast(factor, gradient.dtype))


def updates_weights(optimizer: Any) -> "int | tf.Tensor":
    """Returns 1 if the present step updates the weights, 0 if it only accumulates; an int or an int64 scalar."""
    update = OptimizerUpdate(optimizers_of(optimizer)[0], [])
    steps = update.accumulation_steps
    return 1 if steps == 1 else tf.cast(tf.equal((update.micro_steps + 1) % steps, 0), tf.int64)


def update_columns(
    optimizer: Any,
    variables: Sequence[keras.Variable],
    gradients: Sequence[Sequence[Any]],
    columns: Columns,
    *,
    compiles_large: bool,
) -> None:
    """Updates the variables of all columns as the optimizer would update them in one process.

    Args:
        optimizer: The compiled optimizer.
        variables: The trainable variables.
        gradients: By column and variable, of the loss of the batch; equal in all columns, on the devices of their
            variables. None for a variable that the loss does not depend on.
        columns: The columns.
        compiles_large: Whether XLA may compile the updates of large variables on CPUs.
    """
    inner, outer = optimizers_of(optimizer)
    known = positions_of_gradients(inner, gradients[0], variables)
    chosen = [variables[index] for index in known]
    of_columns = [[of_column[index] for index in known] for of_column in gradients]
    scale = None if outer is None else LossScale(outer)
    update = OptimizerUpdate(inner, chosen, scale)
    _Application(update, inner, chosen, columns, compiles_large=compiles_large).micro_step(of_columns)
    count_micro_step(inner)


class _Application:
    """The update of all columns with given gradients."""

    def __init__(
        self,
        update: OptimizerUpdate,
        optimizer: Any,
        variables: Sequence[keras.Variable],
        columns: Columns,
        *,
        compiles_large: bool,
    ) -> None:
        self._update, self._optimizer, self._variables, self._columns = update, optimizer, variables, columns
        # XLA rounds differently on CPUs with different instructions, but columns must stay bit-identical.
        self._compiles_large = compiles_large and len(columns) == 1
        # Accumulators are scaled by it, as `GradientAccumulation` expects them at the end of `fit`.
        self._factor = optimizer.loss_scale_factor if update.loss_scale is None else update.loss_scale.value

    def micro_step(self, gradients: Sequence[Sequence[Any]]) -> None:
        """Accumulates the gradients, and updates if it is the last micro-step of an update."""
        steps = self._update.accumulation_steps
        if steps == 1:
            return self._finish(gradients, 1)

        def accumulate() -> None:
            for column, of_column in enumerate(gradients):
                with self._columns.entered(column):
                    for accumulator, gradient in zip(self._update.accumulators, of_column, strict=True):
                        with tf.device(accumulator.device):
                            accumulator.assign_add(self._scaled(tf.convert_to_tensor(gradient)))

        def finish() -> None:
            totals = []
            for column, of_column in enumerate(gradients):
                with self._columns.entered(column):
                    pairs = zip(self._update.accumulators, of_column, strict=True)
                    totals.append([self._sum(accumulator, gradient) for accumulator, gradient in pairs])
            self._finish(totals, steps)
            for column in range(len(gradients)):
                with self._columns.entered(column):
                    for accumulator in self._update.accumulators:
                        with tf.device(accumulator.device):
                            accumulator.assign(tf.zeros_like(accumulator))

        tf.cond(tf.equal((self._update.micro_steps + 1) % steps, 0), doing(finish), doing(accumulate))

    def _scaled(self, gradient: tf.Tensor) -> tf.Tensor:
        return gradient if self._factor is None else gradient * tf.cast(self._factor, gradient.dtype)

    def _sum(self, accumulator: tf.Variable, gradient: Any) -> tf.Tensor:
        with tf.device(accumulator.device):
            accumulated = accumulator.read_value()
            if self._factor is not None:
                accumulated /= tf.cast(self._factor, accumulated.dtype)
            return added(accumulated, gradient)

    def _finish(self, sums: Sequence[Sequence[Any]], micro_steps: int) -> None:
        """Applies the mean over micro-steps. If it is not finite, the complete update is skipped."""
        scale = self._update.loss_scale
        gradients = sums
        if micro_steps > 1:
            gradients = [
                self._on_devices(column, of_column, lambda one: _times(one, 1.0 / tf.cast(micro_steps, one.dtype)))
                for column, of_column in enumerate(sums)
            ]
        if scale is None:
            return self._apply(gradients)
        finite = _all_finite([one for of_column in gradients[: self._columns.ways] for one in of_column])
        # The micro-step is counted after the update; those of a skipped update do not count.
        skip = lambda: self._update.take_back(micro_steps)  # noqa: E731
        tf.cond(finite, doing(lambda: self._apply(gradients)), doing(skip))
        scale.update(finite)
        return None

    def _on_devices(self, column: int, gradients: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
        """Applies a function to each gradient of a column, on the device of its variable."""
        results = []
        with self._columns.entered(column):
            for variable, gradient in zip(self._variables, gradients, strict=True):
                with tf.device(held_variable(variable).device):
                    results.append(function(gradient))
        return results

    def _apply(self, gradients: Sequence[Sequence[Any]]) -> None:
        clip = self._clipping(gradients)
        clipped = [self._on_devices(column, one, clip) for column, one in enumerate(gradients)]
        if self._optimizer.clipnorm:
            clipped = self._clipped_by_norm(clipped)
        update_together = _update_together(self._optimizer)
        together = [index for index, one in enumerate(self._variables) if update_together and self._is_split(one)]
        alone = [index for index in range(len(self._variables)) if index not in together]
        others = [one for one in averaged_variables(self._optimizer) if self._columns.holds(one)]
        others = [one for one in others if not any(one is known for known in self._variables)]
        for column, of_column in enumerate(clipped):
            with self._columns.entered(column):
                average_by_device(self._optimizer, others)
                variables, own = [self._variables[index] for index in alone], [of_column[index] for index in alone]
                apply_by_device(self._optimizer, variables, own, compiles_large=self._compiles_large)
        if together and update_together:
            own_parts = [[of_column[index] for index in together] for of_column in clipped]
            update_together(self._optimizer, [self._variables[index] for index in together], own_parts, self._columns)

    def _is_split(self, variable: keras.Variable) -> bool:
        return id(variable) in self._columns.axes

    def _clipped_by_norm(self, gradients: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Clips each gradient by its norm, that of a split variable by the norm of all of its parts."""
        ways, found = self._columns.ways, [list(of_column) for of_column in gradients]
        squares = [self._on_devices(column, gradients[column], _sum_of_squares) for column in range(ways)]
        for index, variable in enumerate(self._variables):
            square = tf.add_n([of_column[index] for of_column in squares]) if self._is_split(variable) else None
            for of_column, device in zip(found, self._columns.devices_of(variable), strict=True):
                with tf.device(device):
                    own = of_column[index]
                    clip = clip_by_norm(self._optimizer)
                    of_column[index] = clip(own) if square is None else self._scaled_to_norm(own, square)
        return found

    def _scaled_to_norm(self, gradient: Any, square: tf.Tensor) -> Any:
        limit = self._optimizer.clipnorm
        scale = tf.cast(limit / tf.maximum(tf.sqrt(square), limit), gradient.dtype)
        return _times(gradient, scale)

    def _clipping(self, gradients: Sequence[Sequence[Any]]) -> Callable[[Any], Any]:
        """Returns the clipping of the optimizer, except that by `clipnorm`."""
        optimizer = self._optimizer
        if optimizer.clipnorm:
            return lambda gradient: gradient
        if optimizer.clipvalue:
            limit = optimizer.clipvalue
            return lambda gradient: tf.clip_by_value(tf.convert_to_tensor(gradient), -limit, limit)
        if optimizer.global_clipnorm:
            squares = self._on_devices(0, gradients[0], _sum_of_squares)
            for column in range(1, self._columns.ways):  # whose parts of variables are others
                of_column = self._on_devices(column, gradients[column], _sum_of_squares)
                pairs = zip(self._variables, of_column, strict=True)
                squares += [square for variable, square in pairs if id(variable) in self._columns.axes]
            norm = tf.sqrt(tf.add_n([tf.identity(square) for square in squares]))
            limit = optimizer.global_clipnorm
            # As in Keras: a norm that is not finite makes all gradients NaN.
            scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
            return lambda gradient: _times(gradient, tf.cast(scale, gradient.dtype))
        return lambda gradient: gradient


def _update_together(optimizer: Any) -> Callable[..., None] | None:
    """Returns the update of split variables whose step depends on complete ones; None if each part is alone."""
    if isinstance(optimizer, keras.optimizers.Lamb):
        return update_by_lamb
    return update_by_gathering if isinstance(optimizer, GATHERING) else None


def _all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    flags = []
    for gradient in gradients:
        values = getattr(gradient, "values", gradient)
        with tf.device(values.device):
            flags.append(tf.reduce_all(tf.math.is_finite(values)))
    return tf.reduce_all(tf.stack(flags))


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _sum_of_squares(gradient: Any) -> tf.Tensor:
    # Dense, so that rows of the same index are added first.
    return tf.cast(tf.reduce_sum(tf.square(tf.convert_to_tensor(gradient))), tf.float32)
