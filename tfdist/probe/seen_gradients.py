"""The gradients of a real step, and when each of its buckets is complete."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES, fill_buckets
from tfdist.tensorflow_internals.operation_order import after_clocks
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable


@dataclass(frozen=True)
class UpdateGradients:
    """The gradients of one update of an optimizer."""

    paths: tuple[str, ...]  # the paths of the variables
    gradients: tuple[Any, ...]  # dense tensors or `tf.IndexedSlices`


class SeenGradients:
    """Called in the graph of a step with its gradients, in place of their exchange.

    The first step keeps them; later ones note only the times at which buckets are complete.
    """

    def __init__(self) -> None:
        with tf.init_scope():
            self._keeps = ResourceVariable(True, trainable=False)
        # By the paths of an update, because a function may be traced twice.
        self._kept: dict[tuple[str, ...], list[Any]] = {}
        self._times: dict[tuple[str, ...], list[Any]] = {}

    def __call__(self, tensors: Sequence[Any], paths: Sequence[str]) -> Sequence[Any]:
        """Notes the gradients of an update, and returns them: what uses them waits until the times are noted."""
        key = tuple(paths)
        if tf.executing_eagerly() and key in self._kept:
            return tensors
        parts = [_parts(tensor) for tensor in tensors]
        with tf.init_scope():
            kept_variables = [[_variable(part.dtype) for part in tensor_parts] for tensor_parts in parts]
        self._kept[key] = [
            (variables, isinstance(tensor, tf.IndexedSlices), tuple(tensor.shape))
            for variables, tensor in zip(kept_variables, tensors, strict=True)
        ]

        def keep() -> None:
            for variables, tensor_parts in zip(kept_variables, parts, strict=True):
                for variable, part in zip(variables, tensor_parts, strict=True):
                    variable.assign(part)

        if tf.executing_eagerly():
            keep()
            return tensors
        tf.cond(self._keeps, keep, lambda: None)
        dense = [position for position, tensor_parts in enumerate(parts) if len(tensor_parts) == 1]
        buckets = fill_buckets([parts[position][0] for position in dense], DEFAULT_BUCKET_BYTES)
        groups = [[parts[dense[position]][0] for position in bucket.positions] for bucket in buckets]
        groups += [tensor_parts for tensor_parts in parts if len(tensor_parts) > 1]
        with tf.init_scope():
            self._times[key] = [ResourceVariable(0.0, dtype=tf.float64, trainable=False) for _ in groups]
        times = []
        for members, variable in zip(groups, self._times[key], strict=True):
            with tf.control_dependencies(members):
                times.append(tf.timestamp())
            variable.assign(times[-1])
        return after_clocks(times, tensors)

    @property
    def is_complete(self) -> bool:
        """Whether a step has updated variables."""
        first = next(iter(self._kept.values()), None)
        return first is not None and all(_is_set(variables) for variables, *_ in first)

    def stop_keeping(self) -> None:
        """Leaves the gradients as they are from now on."""
        self._keeps.assign(False)

    def times(self) -> list[float]:
        """Returns when each bucket of the last step was complete, in seconds since 1970, in the order of buckets."""
        return [float(variable.numpy()) for times in self._times.values() for variable in times]

    def updates(self) -> list[UpdateGradients]:
        """Returns the kept gradients."""
        return [
            UpdateGradients(paths, tuple(_value(variables, sparse, shape) for variables, sparse, shape in entries))
            for paths, entries in self._kept.items()
        ]


def _parts(tensor: Any) -> list[tf.Tensor]:
    return [tensor.values, tensor.indices] if isinstance(tensor, tf.IndexedSlices) else [tf.convert_to_tensor(tensor)]


def _variable(dtype: tf.DType) -> Any:
    # No gradient has this shape, by which `_is_set` finds out that nothing was assigned yet.
    return ResourceVariable(tf.zeros([0, 0, 0, 0, 0, 0, 0], dtype), trainable=False, shape=tf.TensorShape(None))


def _is_set(variables: Sequence[Any]) -> bool:
    return tuple(variables[0].read_value().shape) != (0,) * 7


def _value(variables: Sequence[Any], is_sparse: bool, shape: tuple[int, ...]) -> Any:
    values = [variable.read_value() for variable in variables]
    return tf.IndexedSlices(*values, tf.constant(shape, values[1].dtype)) if is_sparse else values[0]
