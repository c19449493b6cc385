"""Variables on parameter servers: which server holds them, and how workers read them in another dtype."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.placed_strategy import PlacedExtended
from tfdist.tensorflow_internals.tensorflow_symbols import (
    ParameterServerExtended,
    ResourceVariable,
    record_operation,
    stop_recording,
    variable_accessed,
)
from tfdist.utils.temporary_values import setting_attributes


class _BalancedExtended(ParameterServerExtended):
    """Places each variable on the server that holds the fewest bytes, instead of on one after another.

    Attributes:
        server_bytes: By server, the bytes of the variables placed there.
        colocated_bytes: By server, the bytes of variables colocated with these: optimizer slots.
        keeps_whole: Whether the variable that is being created must not be split by the partitioner.
    """

    server_bytes: list[int]
    colocated_bytes: list[int]
    keeps_whole: Callable[[], bool]
    _variable_partitioner: Any

    # With one replica there is nothing to merge, and a merge call is not possible within a condition, such as that of
    # an update that is skipped after an overflow.
    _use_merge_call = PlacedExtended._use_merge_call
    _replica_ctx_update = PlacedExtended._replica_ctx_update

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        partitioner = None if self.keeps_whole() else self._variable_partitioner
        with setting_attributes(self, _variable_partitioner=partitioner):
            variable = super()._create_variable(next_creator, **kwargs)
        if "colocate_with" in kwargs:
            device = tf.DeviceSpec.from_string(variable.device)
            if device.job == "ps":
                self.colocated_bytes[device.task] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable

    def _create_variable_round_robin(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        initial_value = kwargs.get("initial_value")
        # In a function TensorFlow computes the value outside of it, as far as that is possible.
        if tf.executing_eagerly() and initial_value is not None and not hasattr(initial_value, "checkpoint_position"):
            value = initial_value() if callable(initial_value) else initial_value
            kwargs["initial_value"] = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
        server = min(range(self._num_ps), key=lambda number: self.server_bytes[number] + self.colocated_bytes[number])
        self._variable_count = server
        variable = super()._create_variable_round_robin(next_creator, **kwargs)
        self.server_bytes[server] += (variable.shape.num_elements() or 0) * variable.dtype.size
        return variable


def balance_by_bytes(strategy: Any, keeps_whole: Callable[[], bool]) -> None:
    """Makes `strategy`, a `tf.distribute.ParameterServerStrategy`, place variables by their size.

    `keeps_whole` says whether the variable that is being created must not be split by the strategy's partitioner.
    """
    extended = strategy.extended
    extended.keeps_whole = keeps_whole
    extended.__class__ = _BalancedExtended
    extended.server_bytes = [0] * extended._num_ps
    extended.colocated_bytes = [0] * extended._num_ps


def colocated_variable(value: tf.Tensor, beside: Any, shape: Any = None) -> tf.Variable:
    """Creates a plain variable on the server of another variable; allowed while a function is traced."""
    with tf.init_scope(), tf.device(beside.device):
        return ResourceVariable(value, trainable=False, shape=shape)


def pull_as(variable: Any, dtype: tf.DType, source: Any = None) -> tf.Tensor:
    """Returns the value of `variable`, sent over the network as `dtype`; its gradient is that of the variable.

    `source` is the variable that holds the value, if it is not `variable`: an earlier version of it.
    """
    source = variable if source is None else source
    variable_accessed(variable)
    with stop_recording():
        with tf.device(source.device):
            small = tf.cast(source.read_value(), dtype)
        value = tf.cast(small, variable.dtype)
    record_operation("PullAs", [value], [variable.handle], lambda gradient: [gradient])
    # Keras requests the gradient by the first, optimizers find their slots by the second.
    value.handle, value._unique_id = variable.handle, variable._unique_id
    return value


def look_up_version(variable: Any, source: Any, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of `source`, an earlier version of the table `variable`; their gradient is that of the variable."""
    variable_accessed(variable)
    with stop_recording(), tf.device(source.device):
        rows = tf.nn.embedding_lookup(source, ids)

    def gradient_of_table(gradient: tf.Tensor) -> list[tf.IndexedSlices]:
        return [tf.IndexedSlices(gradient, ids, tf.constant(variable.shape.as_list(), tf.int64))]

    record_operation("LookUpVersion", [rows], [variable.handle], gradient_of_table)
    return rows


def send_as(rows: tf.Tensor, device: str, dtype: tf.DType) -> tf.Tensor:
    """Returns `rows` of `device`, sent from there as `dtype`; the gradient is that of the rows."""
    with stop_recording():
        with tf.device(device):
            small = tf.cast(rows, dtype)
        value = tf.cast(small, rows.dtype)
    record_operation("SendAs", [value], [rows], lambda gradient: [gradient])
    return value
