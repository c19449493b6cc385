"""A variable in shards: complete for whoever reads, saves or assigns it, in parts on devices."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.placed_strategy import ColumnVariable, variable_like

_numbers = itertools.count()


class ShardedVariable:
    """Takes the place of the `tf.Variable` behind a Keras variable.

    Attributes:
        shards: The parts of the first group of devices, then, in the same order, the equal ones of further groups.
        axis: The axis along which the variable is split.
        shape: The shape of the complete variable.
        is_placed: Whether it is on the devices of its stage; False if it was created before the model was cut.
    """

    def __init__(self, whole: Any, axis: int, groups: Sequence[Sequence[str]]) -> None:
        """Splits a variable.

        Args:
            whole: A `tf.Variable`, or a `NewVariable`.
            axis: The axis, whose size is divisible by the number of devices of a group.
            groups: By group, the devices of the parts.
        """
        self.axis, self.shape, self.dtype = axis, whole.shape, whole.dtype
        self.name, self.trainable = whole.name, whole.trainable
        self.aggregation, self.synchronization = whole.aggregation, whole.synchronization
        self._shared_name = whole._shared_name  # under which `tf.train.Checkpoint` knows it
        self._unique_id, self._ways = whole._unique_id, len(groups[0])
        self.is_placed = not isinstance(whole, NewVariable)
        self.shards: tuple[ColumnVariable, ...] = tuple(
            _shard(whole, axis, rank, len(group), device) for group in groups for rank, device in enumerate(group)
        )

    def place(self, groups: Sequence[Sequence[str]]) -> list[ColumnVariable]:
        """Moves the parts from device to device. Returns those that were replaced.

        Args:
            groups: By group, the new devices of the parts.
        """
        before = self.shards
        self.shards = tuple(
            # A part stays if its device does.
            before[rank] if device == before[rank].device else variable_like(before[rank], device)
            for group in groups
            for rank, device in enumerate(group)
        )
        self.is_placed = True
        return [one for one in before if all(one is not other for other in self.shards)]

    @property
    def device(self) -> str:
        """The device of the first part."""
        return str(self.shards[0].device)

    @property
    def copies(self) -> tuple[ColumnVariable, ...]:
        """All parts but the first: what the other columns hold."""
        return self.shards[1:]

    def bounds(self, index: int) -> tuple[int, int]:
        """Returns where the part `shards[index]` begins and ends along the axis."""
        size = int(self.shape[self.axis]) // self._ways
        return index % self._ways * size, (index % self._ways + 1) * size

    def parts(self) -> list[tuple[tuple[slice, ...], ColumnVariable]]:
        """Returns the parts of the first group, each with its place in an array of the complete value."""
        axes = range(len(self.shape))
        return [
            (tuple(slice(*self.bounds(rank)) if axis == self.axis else slice(None) for axis in axes), shard)
            for rank, shard in enumerate(self.shards[: self._ways])
        ]

    def read_value(self) -> tf.Tensor:
        """Returns the complete value, on the device of the first part."""
        with tf.device(self.device):
            return tf.concat([shard.read_value() for shard in self.shards[: self._ways]], self.axis)

    def numpy(self) -> np.ndarray:
        """Returns the complete value."""
        return np.concatenate([shard.numpy() for shard in self.shards[: self._ways]], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> "ShardedVariable":
        """Assigns the parts of a complete value."""
        del args, kwargs
        parts = tf.split(tf.cast(value, self.dtype), self._ways, self.axis)
        for index, shard in enumerate(self.shards):
            with tf.device(shard.device):
                shard.assign(parts[index % self._ways])
        return self

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> "ShardedVariable":
        """Adds a complete value."""
        return self.assign(self.read_value() + tf.cast(value, self.dtype), *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> "ShardedVariable":
        """Subtracts a complete value."""
        return self.assign(self.read_value() - tf.cast(value, self.dtype), *args, **kwargs)

    def value(self) -> tf.Tensor:
        """Returns the complete value, as `tf.Variable.value` does."""
        return self.read_value()

    # What Keras' variables call on what holds their value; other operators convert it to a tensor.
    def __getitem__(self, index: Any) -> tf.Tensor:
        return self.read_value()[index]

    def __neg__(self) -> tf.Tensor:
        return -self.read_value()

    def __abs__(self) -> tf.Tensor:
        return abs(self.read_value())

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {"VARIABLE_VALUE": self.read_value()}

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise ValueError(
            f"A model with split variables cannot be exported. Received: `export` of a model with {self.name!r}. "
            "Expected: complete variables. Save the model by `model.save`, and export what `keras.models.load_model` "
            "returns outside of the strategy's scope."
        )

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        return self.assign(restored_tensors["VARIABLE_VALUE"])


class NewVariable:
    """What a split variable is created from: a value that is evaluated on one device, once, and sent in parts.

    Its attributes are those of a `tf.Variable`.
    """

    def __init__(
        self, shape: Sequence[int], device: str, value: Callable[[Sequence[int]], Any], is_constant: bool, **more: Any
    ) -> None:
        """Prepares the creation.

        Args:
            shape: The shape of the complete variable.
            device: Where the value is computed.
            value: Takes a shape and returns the value.
            is_constant: Whether all elements are equal, so that each part is computed where it is.
            **more: `dtype`, `name`, `trainable`, `aggregation` and `synchronization`.
        """
        self.shape, self.device, self._value = tf.TensorShape(shape), device, value
        self.dtype, self.name, self.trainable = tf.as_dtype(more["dtype"]), f"{more['name']}:0", more["trainable"]
        self.aggregation, self.synchronization = more["aggregation"], more["synchronization"]
        self._shared_name = self._unique_id = f"split_{more['name']}_{next(_numbers)}"
        self.is_constant = is_constant

    def read_value(self) -> tf.Tensor:
        """Returns the complete value."""
        if not hasattr(self, "_whole"):
            self._whole = tf.cast(self._value(self.shape), self.dtype)
        return self._whole

    def constant(self, shape: Sequence[int]) -> tf.Tensor:
        """Returns the value of a part."""
        return tf.cast(self._value(shape), self.dtype)


def _shard(whole: Any, axis: int, rank: int, ways: int, device: str) -> ColumnVariable:
    if isinstance(whole, NewVariable) and whole.is_constant:
        shape = [size // ways if index == axis else size for index, size in enumerate(whole.shape)]
        with tf.init_scope(), tf.device(device):
            return variable_like(_Part(whole, whole.constant(shape)), device)
    with tf.init_scope(), tf.device(whole.device):
        size = whole.shape[axis] // ways
        begin = [rank * size if index == axis else 0 for index in range(len(whole.shape))]
        extent = [size if index == axis else -1 for index in range(len(whole.shape))]
        part = _Part(whole, tf.slice(whole.read_value(), begin, extent))
    return variable_like(part, device)


class _Part:
    """A part of a variable, for `variable_like`."""

    def __init__(self, whole: Any, value: tf.Tensor) -> None:
        self.dtype, self.trainable, self.name = whole.dtype, whole.trainable, whole.name
        self.aggregation, self.synchronization = whole.aggregation, whole.synchronization
        self._unique_id, self._value = whole._unique_id, value

    def read_value(self) -> tf.Tensor:
        return self._value


def _to_tensor(variable: ShardedVariable, dtype: Any = None, name: Any = None, as_ref: bool = False) -> tf.Tensor:
    del name, as_ref
    value = variable.read_value()
    return value if dtype is None else tf.cast(value, dtype)


tf.register_tensor_conversion_function(ShardedVariable, _to_tensor)
