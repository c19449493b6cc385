"""What looks at a training step of `fit` when all workers have made it: at its loss, its gradients and its batch."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

StepFunction = Callable[[Any], Any]  # runs a step on a batch, and returns the logs
_UNKNOWN = -1.0


class StepGuard(Protocol):
    """Decides after each training step what remains of it. The workers' guards decide alike.

    Attributes:
        model: The model whose steps these are.
        values: The loss and the norm of the gradients.
    """

    model: Any
    values: "StepValues"

    def before_attempts(self, run: StepFunction) -> StepFunction:
        """Wraps the function that runs a step. It is called again if a worker is lost meanwhile."""

    def after_step(self, run: StepFunction) -> StepFunction:
        """Wraps the function that runs a step until it counts."""


class LastBatch:
    """The batch of the last training step of a `fit` of `model`, on this worker; `None` before the first one."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.batch: Any = None

    def kept_by(self, run: StepFunction) -> StepFunction:
        """Wraps the function that runs a step on a batch."""

        def run_and_keep(batch: Any) -> Any:
            self.batch = batch
            return run(batch)

        return run_and_keep


class StepValues:
    """The loss of the last training step and the squared norms of its gradients, over all replicas, on this worker."""

    def __init__(self) -> None:
        self._loss: Any = None  # float32 scalar
        self._squares: dict[int, Any] = {}  # float32 scalars, by the identity of the optimizer

    def store_loss(self, loss: tf.Tensor) -> None:
        """Stores the loss of a step over all replicas. It is traced on one replica of this worker."""
        if self._loss is None:
            self._loss = _scalar()
        self._loss.assign(tf.cast(loss, tf.float32))

    def store_gradients(self, optimizer: Any, gradients: Sequence[Any], *, may_overflow: bool) -> None:
        """Stores the norm of the gradients of an optimizer's update, summed over all replicas.

        `may_overflow`: a loss scale takes care of gradients that are not finite, which are then not stored.
        """
        if not _is_first_replica():
            return
        squares = tf.add_n([_squares(gradient) for gradient in gradients if gradient is not None])
        if may_overflow:
            squares = tf.where(tf.math.is_finite(squares), squares, _UNKNOWN)
        if id(optimizer) not in self._squares:
            self._squares[id(optimizer)] = _scalar()
        self._squares[id(optimizer)].assign(squares)

    def read(self) -> dict[str, float]:
        """Returns "loss" and "gradient norm" of the last step, as far as they are known."""
        values = {} if self._loss is None else {"loss": float(self._loss.numpy())}
        squares = [float(variable.numpy()) for variable in self._squares.values()]
        if squares and _UNKNOWN not in squares:
            values["gradient norm"] = math.sqrt(sum(squares)) if math.isfinite(sum(squares)) else math.inf
        return values


def _scalar() -> Any:
    with tf.init_scope(), tf.device("CPU:0"):
        return ResourceVariable(0.0, trainable=False, name="tfdist_step_value")


def _squares(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return 2.0 * tf.nn.l2_loss(tf.cast(values, tf.float32))


def _is_first_replica() -> bool:
    """Whether the replica that is traced is the first of this worker."""
    context = tf.distribute.get_replica_context()
    strategy: Any = context.strategy
    first = sum(strategy.replicas_of_workers[: strategy.rank])
    return int(tf.get_static_value(tf.convert_to_tensor(context.replica_id_in_sync_group))) == first
