"""Launchers of reductions between workers, which exchange outside of TensorFlow."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.sent_dtypes import as_values
from tfdist.tensorflow_internals.tensorflow_symbols import CollectiveReplicaLauncher
from tfdist.tensorflow_internals.xla_functions import (
    CannotCompileError,
    is_compiling,
    reject_exchange_in_compiled_function,
)


class GroupLauncher(CollectiveReplicaLauncher):
    """What launches the reductions of one replica in a group.

    Attributes:
        reduces_and_scatters: Whether there is a `reduce_scatter`.
        may_lose_replicas: Whether replicas may be lost, whose tensors are then zeros.
        sends_short_sums_at_once: Whether each replica sends short tensors to all others, who add them.
    """

    reduces_and_scatters = False
    sends_short_sums_at_once = False
    may_lose_replicas = False

    @property
    def size(self) -> int:
        """Number of replicas that take part."""
        return int(self._group_size)

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def host(self) -> str:
        """The CPU of this replica's worker."""
        return tf.DeviceSpec.from_string(self._device).replace(device_type="CPU", device_index=0).to_string()


class WorkersLauncher(GroupLauncher):
    """Sums and gathers over the first devices of all workers.

    Args:
        boundary: To the exchange with the other workers: `all_reduce`, `all_gather` and `all_to_all` of tensors.
        in_background: The number of a group that exchanges beside the steps, or `None`.
    """

    reduces_and_scatters = True
    sends_short_sums_at_once = True

    def __init__(self, boundary: Any, keys: Any, device: str, options: Any, in_background: int | None = None) -> None:
        super().__init__(0, boundary.size, keys, device, options)
        self._boundary, self._in_background = boundary, in_background
        self.may_lose_replicas = boundary.run_alone is not None

    def sum(self, tensor: tf.Tensor, options: Any = None, *, shape_is_fixed: bool = True) -> tf.Tensor:
        """Sums the replicas' tensors, which have the same shape."""
        _check_not_compiling()
        return self._boundary.all_reduce(tensor, **self._options_of(options, shape_is_fixed))

    def gather(self, tensor: tf.Tensor, options: Any = None, *, shape_is_fixed: bool = True) -> tf.Tensor:
        """Concatenates the replicas' tensors, which have the same shape, along their first dimension."""
        _check_not_compiling()
        return self._boundary.all_gather(tensor, **self._options_of(options, shape_is_fixed))

    def exchange(self, tensor: tf.Tensor, options: Any = None) -> tf.Tensor:
        """Sends row `i` of `tensor`, `[size, ...]`, to the replica at position `i`; returns the received rows."""
        _check_not_compiling()
        return self._boundary.all_to_all(tensor, **self._options_of(options))

    def reduce_scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the replicas' rows at the position of this one."""
        _check_not_compiling()
        return self._boundary.reduce_scatter(rows, **self._options_of())

    def _options_of(self, options: Any = None, shape_is_fixed: bool = True) -> dict[str, Any]:
        limit_seconds = self._options.merge(options).timeout_seconds
        return {"in_background": self._in_background, "shape_is_fixed": shape_is_fixed, "limit_seconds": limit_seconds}

    # What TensorFlow's cross-device operations call.

    def all_reduce(self, input_tensor: Any, control_input: Any = None, options: Any = None) -> tf.Tensor:
        with tf.device(self._device):
            return tf.identity(self.sum(tf.convert_to_tensor(input_tensor), options, shape_is_fixed=False))

    def all_gather(self, input_tensor: Any, axis: Any, options: Any = None) -> tf.Tensor:
        sent, restored = as_values(tf.convert_to_tensor(input_tensor))  # TensorFlow's method transposes
        return restored(super().all_gather(sent, axis, options))

    def _all_gather(self, input_tensor: Any, options: Any = None) -> tf.Tensor:
        with tf.device(self._device):
            return tf.identity(self.gather(tf.convert_to_tensor(input_tensor), options, shape_is_fixed=False))


class DevicesOfWorkersLauncher(WorkersLauncher):
    """Sums and gathers over all devices of all workers: within each worker, between first devices, within again.

    Args:
        local: The launcher of this device in the group of its worker; `None` if the worker has no other device.
        counts: The number of devices of each worker, by rank.
        index: Of this device in its worker.
    """

    reduces_and_scatters = False
    sends_short_sums_at_once = False

    def __init__(
        self,
        boundary: Any,
        keys: Any,
        device: str,
        options: Any,
        local: Any,
        counts: Sequence[int],
        rank: int,
        index: int,
    ) -> None:
        super().__init__(boundary, keys, device, options)
        self._group_size = sum(counts)
        self._local, self._counts, self._index = local, tuple(counts), index
        self._position = sum(counts[:rank]) + index

    def sum(self, tensor: tf.Tensor, options: Any = None, *, shape_is_fixed: bool = True) -> tf.Tensor:
        total = self._within(tensor, shape_is_fixed)
        try:
            of_workers = (
                tf.zeros_like(total) if self._index else super().sum(total, options, shape_is_fixed=shape_is_fixed)
            )
        except tf.errors.OpError:
            self._within(total, shape_is_fixed)  # eagerly, the other devices wait for this one, each in a thread
            raise
        return self._within(tf.ensure_shape(of_workers, tensor.shape), shape_is_fixed)

    def gather(self, tensor: tf.Tensor, options: Any = None, *, shape_is_fixed: bool = True) -> tf.Tensor:
        local = self._local
        own_rows = tensor if local is None else local.gather(tensor, None, shape_is_fixed=shape_is_fixed)
        rows, most = tf.shape(tensor)[0], max(self._counts)
        padding = most - (1 if local is None else local.size)
        shape = tf.concat([[rows * padding], tf.shape(tensor)[1:]], axis=0)
        padded = tf.concat([own_rows, tf.zeros(shape, own_rows.dtype)], axis=0) if padding else own_rows
        if self._index:
            shape = tf.concat([[rows * most * len(self._counts)], tf.shape(tensor)[1:]], axis=0)
            gathered = tf.zeros(shape, tensor.dtype)
        else:
            gathered = super().gather(padded, options, shape_is_fixed=shape_is_fixed)
        if len(set(self._counts)) > 1:
            workers = tf.split(gathered, len(self._counts), axis=0)
            gathered = tf.concat([part[: rows * n] for part, n in zip(workers, self._counts, strict=True)], axis=0)
        # All devices of the worker must know the same of the shape: TensorFlow's collectives are matched by it.
        static_rows = tensor.shape[0]
        shape = [None if static_rows is None else static_rows * self.size, *tensor.shape[1:]]
        gathered = tf.ensure_shape(gathered, shape)
        return tf.ensure_shape(self._within(gathered, shape_is_fixed), shape)

    def exchange(self, tensor: tf.Tensor, options: Any = None) -> tf.Tensor:
        return self.gather(tensor[tf.newaxis], options)[:, self._position]

    def _within(self, tensor: tf.Tensor, shape_is_fixed: bool) -> tf.Tensor:
        """Sums over the devices of this worker; where all but the first pass zeros, they get its tensor."""
        return tensor if self._local is None else self._local.sum(tensor, None, shape_is_fixed=shape_is_fixed)


def _check_not_compiling() -> None:
    if is_compiling():
        raise CannotCompileError
    reject_exchange_in_compiled_function()
