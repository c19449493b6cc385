"""The number of samples of each replica, its fraction of the global batch, and the split of rows among replicas."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.compiled_calls import rejects_xla
from tfdist.keras_internals.keras_symbols import losses
from tfdist.keras_internals.losses import times
from tfdist.keras_internals.model_introspection import added_losses, set_added_losses
from tfdist.load_balancing.step_timer import TimedStep
from tfdist.losses.loss_scaling import LossStep
from tfdist.tensorflow_internals.merge_calls import sum_over_replicas
from tfdist.utils.temporary_values import setting, setting_attributes

_current: contextvars.ContextVar["ReplicaStep | None"] = contextvars.ContextVar("tfdist_replica_step", default=None)


def current_step() -> "ReplicaStep | None":
    """Returns the Keras step that this replica runs, or None."""
    return _current.get()


def compiles_calls() -> bool:
    """Whether XLA compiles the calls of layers, losses and updates here: in a step, not in a loop or branch of it."""
    step = _current.get()
    return step is not None and step.graph is tf.compat.v1.get_default_graph()


def compiles_updates() -> bool | None:
    """Whether XLA compiles updates here: `None` for those of large variables alone, if the user has not decided."""
    step = _current.get()
    if compiles_calls():
        return True
    return False if step is not None and step.model is not None and rejects_xla(step.model) else None


def has_samples() -> bool | tf.Tensor | None:
    """Whether this replica has samples in its Keras step, a bool scalar if that is not known yet; None without one."""
    step = _current.get()
    return None if step is None else step.contributes


def keep_added_losses() -> Callable[[], None]:
    """Notes which losses the layers have added on this replica; returns a function that restores them.

    Layers keep them in attributes, so those of another replica replace them when it runs.
    """
    step = _current.get()
    if step is None or step.model is None:
        return lambda: None
    losses = added_losses(step.model)
    return lambda: set_added_losses(losses)


def time_wait(tensors: Sequence[Any]) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    """Leaves a reduction of `tensors` out of the time that this replica computes; see `TimedStep.waiting`."""
    timing = current_timing()
    return (tensors, lambda reduced: reduced) if timing is None else timing.waiting(tensors)


def current_timing() -> TimedStep | None:
    """Returns what times the step that this replica runs, or None."""
    step = _current.get()
    return None if step is None else step.timing


def note_read_number() -> None:
    """Notes that the user's code has read the number of replicas in the step of this replica, if one is running."""
    step = _current.get()
    if step is not None:
        step.has_read_number = True


class ReplicaStep(LossStep):
    """One replica's part of a Keras step.

    The gradient of a global batch is the sum of the replicas' gradients if each replica's mean loss is multiplied by
    its `fraction` of the samples. With equal parts that is Keras' `1 / N`. Each micro-batch has a separate step.

    Attributes:
        graph: The graph of the step if XLA compiles the calls of layers, losses and updates in it, else `None`.
        model: The model whose step it is.
        contributes: Whether this replica has samples.
        timing: Measures how long the replica computes; `None` if nobody asks.
        is_within_worker: Whether the other replicas are those of this worker, and its share is one of the worker's.
        samples_of_worker: The number of samples of all replicas, if so.
    """

    has_totals = True
    graph: Any = None
    model: Any = None
    timing: "TimedStep | None" = None
    is_within_worker = False
    samples_of_worker: Any = None

    def __init__(
        self,
        samples: int | tf.Tensor,
        fraction: float | tf.Tensor,
        parts_of_replica: int = 1,
        filled_rows: int | None = None,
    ) -> None:
        """Describes a replica's part, or a micro-batch of it.

        Args:
            samples: This replica's number of samples, an int or an int32 scalar.
            fraction: `samples` divided by all replicas' samples, a float or a float32 scalar.
            parts_of_replica: The number of micro-batches of the replica.
            filled_rows: The static size of a part that has either as many samples or none; otherwise `None`.
        """
        self.samples = samples
        self.fraction = fraction
        self.parts_of_replica = parts_of_replica
        self.filled_rows = filled_rows
        self.contributes: bool | tf.Tensor = samples > 0
        self._fraction_of_samples = fraction

    @property
    def samples_are_static(self) -> bool:
        """Whether the number of samples, if there are any, is known while the step is traced."""
        return isinstance(self.number_of_samples, int)

    @property
    def mean_scale(self) -> Any:
        """The replica's fraction of the samples."""
        return self._fraction_of_samples

    @property
    def sum_scale(self) -> Any:
        """1, because the replicas' sums add up to that of the global batch; 0 for a replica without samples."""
        return 1 if self.contributes is True else tf.cast(self.contributes, tf.float32)

    @property
    def number_of_samples(self) -> Any:
        """The number of rows on which the replica computes, an int if it is known: its samples, or filled rows."""
        return self.samples if self.filled_rows is None else self.filled_rows

    @property
    def may_lack_rows(self) -> bool:
        """Whether the batch may have no rows, as far as is known while the step is traced."""
        return not isinstance(self.number_of_samples, int) or not self.number_of_samples

    def micro_batch(self, samples: int | tf.Tensor, parts: int) -> "ReplicaStep":
        """Returns the step of one of `parts` micro-batches, which has `samples` of this step's samples."""
        rows, fraction = None, self.fraction
        if isinstance(samples, int) and isinstance(self.samples, int) and isinstance(fraction, float):
            fraction = fraction * samples / max(self.samples, 1)
        else:
            if self.filled_rows is not None and isinstance(samples, int):
                rows, samples = samples, tf.where(self.contributes, samples, 0)
            share = tf.math.divide_no_nan(tf.cast(samples, tf.float32), tf.cast(self.samples, tf.float32))
            fraction = fraction * share
        step = ReplicaStep(samples, fraction, parts, rows)
        step.is_within_worker, step.replicas, step.timing = self.is_within_worker, self.replicas, self.timing
        step.samples_of_worker, step.has_own_loss, step.graph = self.samples_of_worker, self.has_own_loss, self.graph
        return step

    def stay_within_worker(self, local_replicas: int) -> None:
        """Makes this a step of a worker with `local_replicas` that trains by itself, as if there were no others."""
        self.is_within_worker, self.replicas = True, local_replicas
        if isinstance(self.fraction, float):
            self.samples_of_worker = self.samples / self.fraction
            return
        # Statistics that a worker without samples has not changed are averaged.
        has_samples = self.samples_of_worker > 0
        self.fraction = self._fraction_of_samples = tf.where(has_samples, self.fraction, 1 / local_replicas)

    def running(self) -> AbstractContextManager[None]:
        """Sets this as the `current_step` of the replica."""
        return setting(_current, self)

    def share_of(self, divisor: tf.Tensor) -> AbstractContextManager[None]:
        """Sets `fraction` to this replica's share of the sum of all replicas' `divisor`, a float32 scalar.

        A replica without samples computes on a sample of another one, and has no share.
        """
        divisor = times(tf.stop_gradient(divisor), self.sum_scale)
        return setting_attributes(self, fraction=tf.math.divide_no_nan(divisor, self.total_of(divisor)))

    def total_of(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all replicas' `value`, a float32 scalar; a replica without samples adds nothing."""
        (total,) = sum_over_replicas([times(tf.cast(tf.stop_gradient(value), tf.float32), self.sum_scale)])
        return total


def static_samples(value: Any) -> int | None:
    """Returns the number of samples of an input if it is known while tracing, else None."""
    shape = getattr(value, "shape", None)
    return None if shape is None or getattr(shape, "rank", 1) is None or len(shape) == 0 else shape[0]


def count_samples(value: Any) -> tf.Tensor:
    """Returns the number of samples of an input (dense, ragged or sparse), an int32 scalar."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0]


def number_of_samples(value: Any) -> int | tf.Tensor:
    """Returns the number of samples of an input, an int if it is known while tracing, else an int32 scalar."""
    static = static_samples(value)
    return count_samples(value) if static is None else int(static)


def tensors_in(data: Any) -> list[tf.Tensor]:
    """Returns the tensors of a structure, and those of which its ragged and sparse ones consist."""
    return [leaf for leaf in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(leaf)]


def is_distributed(data: Any) -> bool:
    """Whether a strategy has distributed `data` already."""
    return any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(data))


def rows_of_part(data: Any, counted: Any, part: int, parts: int) -> Any:
    """Returns the rows of one of `parts` nearly equal parts of a batch, in order.

    Each leaf of `data` (dense, ragged or sparse tensors, or arrays) that has as many rows as the leaf `counted`, the
    samples, as far as they are known, is sliced.
    """
    samples = number_of_samples(counted)
    return rows_between(data, counted, part * samples // parts, (part + 1) * samples // parts)


def rows_between(data: Any, counted: Any, first: Any, end: Any) -> Any:
    """Returns the rows from `first` to `end`, without `end`, of a batch; see `rows_of_part`."""
    static = counted.shape[0]

    def cut(leaf: Any) -> Any:
        if not has_rows(leaf) or None not in (static, leaf.shape[0]) and leaf.shape[0] != static:
            return leaf
        return _sparse_rows(leaf, first, end) if isinstance(leaf, tf.SparseTensor) else leaf[first:end]

    return tf.nest.map_structure(cut, data)


def has_rows(leaf: Any) -> bool:
    """Whether `leaf` is an array or a tensor, and not a scalar as far as its rank is known."""
    shape = getattr(leaf, "shape", ())
    return shape.rank != 0 if isinstance(shape, tf.TensorShape) else len(shape) > 0


def _sparse_rows(leaf: tf.SparseTensor, first: Any, end: Any) -> tf.SparseTensor:
    row_shape = leaf.dense_shape[1:]
    start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros_like(row_shape)], axis=0)
    return tf.sparse.slice(leaf, start, tf.concat([[tf.cast(end - first, tf.int64)], row_shape], axis=0))


def scale_loss_for_distribution(loss: Any) -> Any:
    """Scales a mean over a replica's samples so that the sum over the replicas is the mean over the global batch.

    tfdist scales the losses of Keras, `self.compute_loss`, and the means and sums of a `train_step` itself. Use this
    for a loss that it cannot follow, of which it warns: one that is computed in a `tf.function`, a condition or a loop
    of the step, or with `run_eagerly=True`.

    Args:
        loss: The mean over the samples that this replica was given, a float scalar.

    Returns:
        `loss` multiplied by the replica's fraction of the samples, a scalar. Without a strategy, and in a layer's
        `call`, `loss` itself.

    >>> import tensorflow as tf
    >>> scale_loss_for_distribution(tf.constant(2.0)).numpy()
    np.float32(2.0)
    """
    return losses.scale_loss_for_distribution(loss)


def unscale_loss_for_distribution(loss: Any) -> Any:
    """Returns the mean over a replica's samples from a scaled loss: the inverse of `scale_loss_for_distribution`.

    `keras.metrics.Mean`, `Sum` and the logs that a step returns do not need it. Use it for a loss of Keras in metrics
    of another class, and in computations other than sums.

    Args:
        loss: A scaled loss, a float scalar: the result of a Keras loss, of `self.compute_loss` or of
            `scale_loss_for_distribution`.

    Returns:
        A scalar, whose mean over the replicas, weighted by samples, is the loss of the global batch.

    >>> import tensorflow as tf
    >>> unscale_loss_for_distribution(tf.constant(2.0)).numpy()
    np.float32(2.0)
    """
    return losses.unscale_loss_for_distribution(loss)
