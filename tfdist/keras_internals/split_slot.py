"""An optimizer's variable of which each replica holds a part, and the Keras optimizer's view of it."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import Variable
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable
from tfdist.utils.temporary_values import setting

# The local replica whose part stands for the variable, while its update is computed.
_replica: contextvars.ContextVar[int | None] = contextvars.ContextVar("tfdist_updating_replica", default=None)

Gather = Callable[[Sequence[tf.Tensor], Sequence[int]], tf.Tensor]


def parts_of_replica(local_replica: int) -> AbstractContextManager[None]:
    """Makes split variables stand for their parts on a replica of this process."""
    return setting(_replica, local_replica)


def is_updating_parts() -> bool:
    """Whether split variables stand for their parts on a replica."""
    return _replica.get() is not None


class SplitSlot(Variable):
    """A variable whose flattened values are split over the replicas of all workers.

    To Keras it is a variable of its whole shape: `numpy`, `assign` and saving use whole values, which reading gathers
    from all workers, so all of them have to read it. Within `parts_of_replica` it is the part of that replica.
    """

    _kind = "slot"
    _remedy = "Read `optimizer.variables` between two steps, or create the strategy without `shard_optimizer_state`."

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        devices: Sequence[str],
        first: int,
        gather: Gather,
        *,
        is_whole: bool,
        **more: Any,
    ):
        """Creates the parts of this process.

        Args:
            bounds: Begin and end of the part of each replica, over all workers.
            is_whole: Whether one replica holds all values. Its part has the shape of the variable.
            devices: The devices of the replicas of this process.
            first: The number of the first replica of this process.
            gather: Takes the parts of this process's replicas, flat, and the lengths of all parts; returns all parts
                as one vector.
            **more: Arguments of `keras.Variable`, with an initializer that is called.
        """
        self._bounds, self._devices, self._first, self._gather = list(bounds), list(devices), first, gather
        self._is_whole = is_whole
        super().__init__(**more)

    def _initialize(self, value: Any) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._create_parts(tf.convert_to_tensor(value() if callable(value) else value))

    def _create_parts(self, value: tf.Tensor) -> None:
        """Creates the parts of this process of a whole value."""
        flat = tf.reshape(value, [-1])
        self._parts: list[tf.Variable] = []
        for device, (start, stop) in zip(self._devices, self._own_bounds, strict=True):
            with tf.init_scope(), tf.device(device):
                # A slice shares, and would keep, the memory of the whole value.
                part = tf.raw_ops.DeepCopy(x=tf.identity(self._part(flat, start, stop)))
                self._parts.append(ResourceVariable(part, trainable=self.trainable, name=self.name))
        self._value = self._parts[0]

    def _part(self, flat: tf.Tensor, start: int, stop: int) -> tf.Tensor:
        part = flat[start:stop]
        return tf.reshape(part, self._shape) if self._is_whole and stop > start else part

    @property
    def _own_bounds(self) -> list[tuple[int, int]]:
        return self._bounds[self._first : self._first + len(self._devices)]

    @property
    def parts(self) -> list[tf.Variable]:
        """The parts of this process's replicas, in their order: flat, or for one of them the whole value."""
        return self._parts

    @property
    def value(self) -> Any:
        """The part of the replica that is being updated; elsewhere the whole value, a tensor."""
        replica = _replica.get()
        if replica is None:
            return self.read_value()
        start, stop = self._own_bounds[replica]
        if self._is_whole and start == stop and 0 not in self._shape:
            raise ValueError(
                "An optimizer whose state is sharded updates each variable on the replica that holds its slots. "
                f"Received: an update of another variable that uses the slot {self.path!r}. Expected: `update_step` "
                "uses slots of the variable that it updates. Create the strategy without `shard_optimizer_state`."
            )
        return self._parts[replica]

    @property
    def shape(self) -> tf.TensorShape:
        replica = _replica.get()
        return tf.TensorShape(self._shape) if replica is None else self._parts[replica].shape

    @property
    def device(self) -> str:
        """Empty: its parts are on several devices."""
        return ""

    def read_value(self) -> tf.Tensor:
        """Returns the whole value. All workers have to call this, outside of a `tf.function`."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"A {self._kind} in parts cannot be read within a function, because no replica holds all of it. "
                f"Received: {self.path!r}. Expected: a read outside of `tf.function` and `strategy.run`, by all "
                f"workers. {self._remedy}"
            )
        lengths = [stop - start for start, stop in self._bounds]
        return tf.reshape(self._gather([tf.reshape(part, [-1]) for part in self._parts], lengths), self._shape)

    def numpy(self) -> np.ndarray:
        return np.asarray(self.read_value().numpy())

    def assign(self, value: Any) -> Any:
        """Assigns a whole value, equal on all workers; within `parts_of_replica` the part."""
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if value.shape != self.shape:
            raise ValueError(
                f"The shapes of a variable and its new value differ. Received: {tuple(value.shape)} for {self.path!r}. "
                f"Expected: {tuple(self.shape)}. Pass a value of that shape."
            )
        replica = _replica.get()
        if replica is not None:
            self._parts[replica].assign(value)
            return value
        flat = tf.reshape(value, [-1])
        for part, (start, stop) in zip(self._parts, self._own_bounds, strict=True):
            part.assign(self._part(flat, start, stop))
        return value

    def _direct_assign(self, value: Any) -> None:
        self.assign(value)

    @property
    def _shared_name(self) -> str:
        return str(self.name)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        with tf.init_scope():  # a SavedModel is written by a function, once
            return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        self.assign(restored_tensors["VARIABLE_VALUE"])

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, options: Any, **more: Any) -> list[Any]:
        del tensor_map, options, more
        object_map[self] = tf.Variable(tf.zeros(self._shape, self._dtype), trainable=False)  # its value is restored
        return []

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        del options
        proto.variable.name, proto.variable.trainable = self.name, False
        proto.variable.dtype = tf.as_dtype(self._dtype).as_datatype_enum
        proto.variable.shape.CopyFrom(tf.TensorShape(self._shape).as_proto())
