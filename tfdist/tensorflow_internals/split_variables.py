"""A variable in shards: complete for whoever reads, saves or assigns it, in parts on devices."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.tensorflow_internals.placed_strategy import ColumnVariable, variable_like

_numbers = itertools.count()


def part_size(size: int, ways: int) -> int:
    """Returns the size of each of `ways` equal parts. If `size` is not divisible, the last parts are padded.

    >>> part_size(8, 4), part_size(50257, 4)
    (2, 12565)
    """
    return -(-size // ways)


def part_shape(shape: Sequence[int], axis: int | None, ways: int) -> tuple[int, ...]:
    """Returns the shape of each of `ways` equal parts along an axis; None for a variable that is not split."""
    return tuple(part_size(size, ways) if index == axis else size for index, size in enumerate(shape))


class ShardedVariable:
    """Takes the place of the `tf.Variable` behind a Keras variable.

    Attributes:
        shards: The parts of the first group of devices, then, in the same order, the equal ones of further groups.
        axis: The axis along which the variable is split.
        shape: The shape of the complete variable.
        is_placed: Whether it is on the devices of its stage; False if it was created before the model was cut.
    """

    def __init__(self, whole: Any, axis: int, groups: Sequence[Sequence[str]], *, is_slot: bool = False) -> None:
        """Splits a variable.

        Args:
            whole: A `tf.Variable`, or a `NewVariable`.
            axis: The axis. If the number of devices of a group does not divide its size, the last parts are padded.
            groups: By group, the devices of the parts.
            is_slot: Whether it is a slot of an optimizer, which is padded by its own values, as an update may divide by
                them. Others are padded by zeros.
        """
        self.axis, self.shape, self.dtype = axis, whole.shape, whole.dtype
        self.name, self.trainable = whole.name, whole.trainable
        self.aggregation, self.synchronization = whole.aggregation, whole.synchronization
        self._shared_name = whole._shared_name  # under which `tf.train.Checkpoint` knows it
        self._unique_id, self._ways = whole._unique_id, len(groups[0])
        self.is_placed = not isinstance(whole, NewVariable)
        self.shards: tuple[ColumnVariable, ...] = tuple(
            _shard(whole, axis, rank, device, len(group), is_slot=is_slot)
            for group in groups
            for rank, device in enumerate(group)
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
        return [part for part in before if all(part is not shard for shard in self.shards)]

    @property
    def device(self) -> str:
        """The device of the first part."""
        return str(self.shards[0].device)

    @property
    def in_columns(self) -> tuple[ColumnVariable, ...]:
        """By column, its part."""
        return self.shards

    @property
    def copies(self) -> tuple[ColumnVariable, ...]:
        """All parts but the first: what the other columns hold."""
        return self.shards[1:]

    def bounds(self, index: int) -> tuple[int, int]:
        """Returns where the part `shards[index]` begins and ends along the axis, without what it is padded by."""
        size = int(self.shape[self.axis])
        of_part = part_size(size, self._ways)
        begin = min(index % self._ways * of_part, size)
        return begin, min(begin + of_part, size)

    def parts(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...], ColumnVariable]]:
        """Returns the parts of the first group, each with its place in an array of the complete value.

        Returns:
            By part the place, the place of these values in the part, and the part.
        """
        places = []
        for rank, shard in enumerate(self.shards[: self._ways]):
            begin, end = self.bounds(rank)
            places.append((self._places(begin, end), self._places(0, end - begin), shard))
        return places

    def _places(self, begin: int, end: int) -> tuple[slice, ...]:
        return tuple(slice(begin, end) if axis == self.axis else slice(None) for axis in range(len(self.shape)))

    def read_value(self) -> tf.Tensor:
        """Returns the complete value, on the device of the first part."""
        with tf.device(self.device):
            return self.joined([shard.read_value() for shard in self.shards[: self._ways]])

    def joined(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the complete value of parts of a group, in their order."""
        whole = tf.concat(parts, self.axis)
        size = int(self.shape[self.axis])
        return whole if whole.shape[self.axis] == size else whole[self._places(0, size)]

    def part_of(self, value: tf.Tensor, index: int) -> tf.Tensor:
        """Returns what the part `shards[index]` has of a complete value, and by what it is padded."""
        return self.padded(value[self._places(*self.bounds(index))], index)

    def padded(self, value: tf.Tensor, index: int) -> tf.Tensor:
        """Returns a value for `shards[index]` without padding together with what the part is padded by."""
        begin, end = self.bounds(index)
        of_part = part_size(int(self.shape[self.axis]), self._ways)
        if end - begin == of_part:
            return value
        return tf.concat([value, self.shards[index].read_value()[self._places(end - begin, of_part)]], self.axis)

    def numpy(self) -> np.ndarray:
        """Returns the complete value."""
        return np.concatenate([shard.numpy()[place] for _, place, shard in self.parts()], self.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> "ShardedVariable":
        """Assigns the parts of a complete value."""
        del args, kwargs
        whole = tf.cast(value, self.dtype)
        parts = [whole[self._places(*self.bounds(rank))] for rank in range(self._ways)]
        for index, shard in enumerate(self.shards):
            with tf.device(shard.device):
                shard.assign(self.padded(parts[index % self._ways], index))
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


def _shard(whole: Any, axis: int, rank: int, device: str, ways: int, *, is_slot: bool) -> ColumnVariable:
    size, of_part = int(whole.shape[axis]), part_size(int(whole.shape[axis]), ways)
    own_size = max(min(of_part, size - rank * of_part), 0)
    shape = [of_part if index == axis else int(length) for index, length in enumerate(whole.shape)]
    if isinstance(whole, NewVariable) and whole.is_constant:
        with tf.init_scope(), tf.device(device):
            value = whole.constant(shape)
            if own_size < of_part and not is_slot:
                value = tf.where(_position(axis, shape) < own_size, value, tf.zeros([], value.dtype))
            return variable_like(_Part(whole, value), device)
    with tf.init_scope(), tf.device(whole.device):
        value = whole.read_value()
        begin = [min(rank * of_part, size - 1) if index == axis else 0 for index in range(len(shape))]
        extent = [max(own_size, 1) if index == axis else -1 for index in range(len(shape))]
        value = tf.slice(value, begin, extent)  # of a part without values the last one, to pad it
        if own_size < of_part:
            value = _padded(value, axis, own_size, shape, is_slot=is_slot)
        part = _Part(whole, value)
    return variable_like(part, device)


def _position(axis: int, shape: Sequence[int]) -> tf.Tensor:
    """Returns the position along an axis, of a shape that is broadcast."""
    return tf.reshape(tf.range(shape[axis]), [-1 if index == axis else 1 for index in range(len(shape))])


def _padded(value: tf.Tensor, axis: int, own_size: int, shape: Sequence[int], *, is_slot: bool) -> tf.Tensor:
    last = tf.gather(value, [value.shape[axis] - 1] * (shape[axis] - own_size), axis=axis)
    padding = last if is_slot else tf.zeros_like(last)
    return tf.concat([value, padding], axis) if own_size else padding


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
