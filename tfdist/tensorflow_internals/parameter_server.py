"""What TensorFlow's parameter server strategy does not tell or let choose."""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.symbols import (
    ParameterServerExtended,
    ResourceVariable,
    dispatch_context,
    get_default_graph,
    record_operation,
    stop_recording,
    variable_accessed,
)


class _BalancedExtended(ParameterServerExtended):
    """Places each variable on the server that holds the fewest bytes, not on one after another.

    Attributes:
      server_bytes: of the variables that were placed on each server.
      beside_bytes: of those that were made beside them: what optimizers keep of them.
    """

    server_bytes: list[int]
    beside_bytes: list[int]

    # There is one replica, so that nothing is to be merged; and a merge call cannot stand in a condition, as an update
    # does that is skipped after an overflow.

    def _use_merge_call(self) -> bool:
        return False

    def _replica_ctx_update(
        self, var: Any, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        return self._update(var, fn, args, kwargs or {}, group)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if "colocate_with" in kwargs:
            place = tf.DeviceSpec.from_string(variable.device)
            if place.job == "ps":
                self.beside_bytes[place.task] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable

    def _create_variable_round_robin(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        initial_value = kwargs.get("initial_value")
        if callable(initial_value) and not hasattr(initial_value, "checkpoint_position"):
            with tf.init_scope():
                kwargs["initial_value"] = initial_value = initial_value()
        size = 0
        if not callable(initial_value) and initial_value is not None:
            kwargs["initial_value"] = value = tf.convert_to_tensor(initial_value, dtype=kwargs.get("dtype"))
            size = (value.shape.num_elements() or 0) * value.dtype.size
        server = min(range(self._num_ps), key=lambda number: self.server_bytes[number] + self.beside_bytes[number])
        self.server_bytes[server] += size
        self._variable_count = server
        return super()._create_variable_round_robin(next_creator, **kwargs)


_coordinators: "weakref.WeakSet[Coordinator]" = weakref.WeakSet()


class Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's, which does not keep the chief from ending while a worker is lost."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        _coordinators.add(self)

    def __del__(self) -> None:
        # When the interpreter ends, its threads stand still, perhaps with the lock that this would wait for.
        if not sys.is_finalizing():
            super().__del__()


def has_coordinators() -> bool:
    """Whether a coordinator of this process is connected to the cluster."""
    return bool(_coordinators)


@contextlib.contextmanager
def without_reconnecting() -> Iterator[bool]:
    """Keeps this process's coordinators from connecting to the cluster again, as they do when a worker is lost.

    TensorFlow crashes if two connect at the same time.

    Yields:
      Whether it was possible; False if one is connecting just now.
    """
    with contextlib.ExitStack() as held:
        is_free = True
        for coordinator in list(_coordinators):
            lock = coordinator._cluster.failure_handler._cluster_update_lock
            if lock.acquire(blocking=False):
                held.callback(lock.release)
            else:
                is_free = False
        yield is_free


def balance_by_bytes(strategy: Any) -> None:
    """Makes `strategy`, a `tf.distribute.ParameterServerStrategy`, place variables by their size."""
    extended = strategy.extended
    extended.__class__ = _BalancedExtended
    extended.server_bytes = [0] * extended._num_ps
    extended.beside_bytes = [0] * extended._num_ps


def may_run_on_chief(strategy: Any) -> None:
    """Lets functions that the chief calls itself use `strategy.run` without a warning."""
    strategy.extended._allow_run_without_coordinator = True


def worker_index() -> tf.Tensor:
    """In a function that is scheduled: the number of the worker that runs it, an int32 scalar; -1 elsewhere."""

    def index() -> tf.Tensor:
        context = dispatch_context()
        return tf.constant(-1 if context is None else context.worker_index, tf.int32)

    return get_default_graph().capture_call_time_value(index, tf.TensorSpec([], tf.int32))


def is_done(remote_value: Any) -> bool:
    """Whether a scheduled function has ended for good.

    A worker may still die between the end of the function and the copy of its output to the chief; then the function
    is run again. So the copy counts.
    """
    return remote_value._has_fetched_to_local or remote_value._error is not None


def variable_beside(value: tf.Tensor, beside: Any, shape: Any = None) -> tf.Variable:
    """A plain variable on the server of another one; may be made while a function is traced."""
    with tf.init_scope(), tf.device(beside.device):
        return ResourceVariable(value, trainable=False, shape=shape)


def pulled(variable: Any, dtype: tf.DType) -> tf.Tensor:
    """The value of `variable`, which crosses the network as `dtype`; the gradient is that of the variable."""
    variable_accessed(variable)
    with stop_recording():
        with tf.device(variable.device):
            small = tf.cast(variable.read_value(), dtype)
        value = tf.cast(small, variable.dtype)
    record_operation("PullAs", [value], [variable.handle], lambda gradient: [gradient])
    # By these Keras asks for the gradient, and optimizers find what they keep of the variable.
    value.handle, value._unique_id = variable.handle, variable._unique_id
    return value


def sent_as(rows: tf.Tensor, device: str, dtype: tf.DType) -> tf.Tensor:
    """The value of `rows`, of `device`, which leaves it as `dtype`; the gradient is that of the rows."""
    with stop_recording():
        with tf.device(device):
            small = tf.cast(rows, dtype)
        value = tf.cast(small, rows.dtype)
    record_operation("SendAs", [value], [rows], lambda gradient: [gradient])
    return value
