"""One update of an optimizer: accumulate, exchange, unscale, check, clip and apply, reset, whoever holds what."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.collectives.all_reduce import ReductionContext
from tfdist.compression.gradient_tensors import all_finite, divided, multiplied, with_shape, zeros_unless
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.tensorflow_internals.merge_calls import cond_over_replicas, sum_over_replicas
from tfdist.tensorflow_internals.shared_operations import shared_operations

# Takes a function that updates, and the sums that it updates by; calls the function.
Around = Callable[[Callable[[], None], Sequence[Any]], None]


class HeldUpdate(Protocol):
    """Who holds which gradients of an update, with the accumulators, slots and weights that belong to them.

    Gradients are lists of tensors or `tf.IndexedSlices`, one for each variable, part or copy that is held here.
    """

    update: OptimizerUpdate
    #: Whether accumulators hold sums over all replicas, so that every micro-step exchanges its gradients.
    exchanges_micro_steps: bool

    @property
    def accumulators(self) -> Sequence[tf.Variable]:
        """The sums of the scaled gradients of the micro-steps of an update."""

    def exchange(self, gradients: Sequence[Any], divisor: Any, contributes: tf.Tensor | None) -> list[Any]:
        """Returns what is held here of the sums over all replicas, of gradients of the scaled loss.

        They are divided before they are sent; `None` stands for 1. `contributes` says whether this replica has samples,
        a bool scalar; `None` if it certainly has.
        """

    def each(self, function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        """Calls `function` for each gradient, where it is held, with the `values` of the same number."""

    def write(self, function: Callable[..., Any], *values: Sequence[Any]) -> None:
        """Calls `function`, which changes an accumulator, for each of them, with the `values` of the same number."""

    def all_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Returns whether all values of all sums are finite, equal everywhere; a bool scalar."""

    def clip_and_apply(self, gradients: Sequence[Any]) -> None:
        """Clips, decays the weights, and updates variables and moving averages by the means of gradients."""


def run_micro_step(
    held: HeldUpdate,
    gradients: Sequence[Any],
    contributes: tf.Tensor | None = None,
    around: Around = lambda apply, sums: apply(),
) -> None:
    """Runs one micro-step, and the update if it is the last micro-step of an update.

    `around` calls the function that updates the variables. For `contributes` see `HeldUpdate.exchange`.
    """
    update, steps = held.update, held.update.accumulation_steps
    if steps == 1 or held.exchanges_micro_steps:
        # Divided before the exchange: the state of a compressor must not depend on a loss scale, which changes, nor on
        # the number of micro-steps of an update.
        gradients, contributes = held.exchange(gradients, _divisor(update, 1), contributes), None
    if steps == 1:
        return _apply(held, gradients, 1, around)
    if held.exchanges_micro_steps and update.loss_scale is not None:
        scale = update.loss_scale.value  # Accumulators hold scaled gradients, and the exchange has divided by it.
        gradients = held.each(lambda gradient: multiplied(gradient, scale), gradients)

    def finish() -> None:
        totals = held.each(_added, held.accumulators, gradients)
        if contributes is not None:
            totals = tf.cond(contributes, lambda: totals, lambda: _read(held))
        _apply_totals(held, totals, steps, around)

    def accumulate() -> None:
        if contributes is None:
            held.write(_add, gradients)
        elif tf.executing_eagerly():  # without a graph, replicas write together, also those without samples
            held.write(_add, held.each(lambda gradient: zeros_unless(contributes, gradient), gradients))
        else:
            tf.cond(contributes, lambda: held.write(_add, gradients), lambda: None)

    cond_over_replicas(tf.equal((update.micro_steps + 1) % steps, 0), finish, accumulate)
    return None


def apply_accumulated(held: HeldUpdate, micro_steps: int, around: Around) -> None:
    """Updates by the mean of the `micro_steps` that the accumulators hold, and resets them."""
    _apply_totals(held, _read(held), micro_steps, around)


def _apply_totals(held: HeldUpdate, totals: Sequence[Any], micro_steps: int, around: Around) -> None:
    """Updates by the sums of the scaled gradients of `micro_steps`, and resets the accumulators."""
    divisor = _divisor(held.update, micro_steps)
    if not held.exchanges_micro_steps:
        totals = held.exchange(totals, divisor, None)
    elif divisor is not None:
        totals = held.each(lambda total: divided(total, divisor), totals)
    _apply(held, totals, micro_steps, around)
    held.write(lambda accumulator: accumulator.assign(tf.zeros_like(accumulator)))


def _apply(held: HeldUpdate, sums: Sequence[Any], micro_steps: int, around: Around) -> None:
    """Updates by the means of gradients over `micro_steps`. If they are not finite, lowers the loss scale instead."""
    update = held.update

    def apply() -> None:
        apply_if_finite(
            update,
            lambda: held.all_finite(sums),
            lambda: held.clip_and_apply(sums),
            # Micro-steps are counted after the update; those of a skipped update must not count.
            lambda: update.take_back(micro_steps),
        )

    around(apply, sums)


def apply_if_finite(
    update: OptimizerUpdate,
    all_finite: Callable[[], tf.Tensor],
    apply: Callable[[], None],
    skip: Callable[[], None] = lambda: None,
) -> tf.Tensor | bool:
    """Updates by the means of gradients. If they are not finite, lowers the loss scale instead, and calls `skip`.

    Without a loss scale it always updates. Returns whether the variables are updated, a bool scalar.
    """
    if update.loss_scale is None:
        apply()
        return True
    finite = all_finite()
    cond_over_replicas(finite, apply, skip)
    update.loss_scale.update(finite)
    return finite


def _divisor(update: OptimizerUpdate, micro_steps: int) -> Any:
    """Returns the number by which gradients of the scaled loss of `micro_steps` are divided; `None` stands for 1."""
    if update.loss_scale is not None:
        return update.loss_scale.value * micro_steps
    return None if micro_steps == 1 else float(micro_steps)


def _read(held: HeldUpdate) -> list[tf.Tensor]:
    return held.each(tf.convert_to_tensor, held.accumulators)


def _add(accumulator: tf.Variable, gradient: Any) -> None:
    """Adds a gradient, dense or `tf.IndexedSlices`, to an accumulator."""
    if isinstance(gradient, tf.IndexedSlices):
        accumulator.scatter_add(gradient)
    else:
        accumulator.assign_add(_like(accumulator, gradient))


def _added(accumulator: tf.Variable, gradient: Any) -> tf.Tensor:
    """Returns the sum of an accumulator and a gradient, and leaves the accumulator unchanged."""
    total = tf.convert_to_tensor(accumulator)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.tensor_scatter_nd_add(total, gradient.indices[:, tf.newaxis], gradient.values)
    return total + _like(accumulator, gradient)


def _like(accumulator: tf.Variable, gradient: tf.Tensor) -> tf.Tensor:
    """Returns a gradient in the dtype and shape of its accumulator; parts may be flat."""
    same = gradient if gradient.shape == accumulator.shape else tf.reshape(gradient, accumulator.shape)
    return tf.cast(same, accumulator.dtype)


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
        return self.update.accumulators

    def exchange(self, gradients: Sequence[Any], divisor: Any, contributes: tf.Tensor | None) -> list[Any]:
        if contributes is not None and tf.executing_eagerly():
            # Eager replicas reduce in a merge call, where a replica's own condition is not known.
            gradients, contributes = [zeros_unless(contributes, gradient) for gradient in gradients], None
        if divisor is not None:
            gradients = [divided(gradient, divisor) for gradient in gradients]
        gradients = [with_shape(gradient, shape) for gradient, shape in zip(gradients, self.update.shapes, strict=True)]
        with self._context.of_gradients(contributes, self.update.paths), shared_operations():
            return self._summed(gradients)

    def each(self, function: Callable[..., Any], *values: Sequence[Any]) -> list[Any]:
        return [function(*of_gradient) for of_gradient in zip(*values, strict=True)]

    def write(self, function: Callable[..., Any], *values: Sequence[Any]) -> None:
        update = self.update.strategy.extended.update
        for accumulator, *of_accumulator in zip(self.accumulators, *values, strict=True):
            update(accumulator, function, args=tuple(of_accumulator), group=False)

    def all_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        return all_finite(gradients)  # sums are bit-identical on all replicas, so this is known without an exchange

    def clip_and_apply(self, gradients: Sequence[Any]) -> None:
        self.update.clip_and_apply(gradients, self._compiles)

    def _summed(self, gradients: Sequence[Any]) -> list[Any]:
        return sum_over_replicas(gradients)
