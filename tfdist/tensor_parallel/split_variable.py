"""A variable in parts on devices: split along an axis, padded where the devices do not divide it, moved, joined."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.placed_variables import NewValue
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable, SplitValue, variable_like


def part_size(size: int, ways: int) -> int:
    """Returns the size of each of `ways` equal parts. If `size` is not divisible, the last parts are padded.

    >>> part_size(8, 4), part_size(50257, 4)
    (2, 12565)
    """
    return -(-size // ways)


def part_shape(shape: Sequence[int], axis: int | None, ways: int) -> tuple[int, ...]:
    """Returns the shape of each of `ways` equal parts along an axis; None for a variable that is not split."""
    return tuple(part_size(size, ways) if index == axis else size for index, size in enumerate(shape))


class SplitVariable(SplitValue):
    """See `SplitValue`. The devices of a group have its parts, in their order.

    Attributes:
        is_placed: Whether it is on the devices of its stage; False if it was created before the model was cut.
    """

    def __init__(self, whole: Any, axis: int, groups: Sequence[Sequence[str]], *, is_slot: bool = False) -> None:
        """Splits a variable.

        Args:
            whole: A `tf.Variable`, or a `NewValue`.
            axis: The axis. If the number of devices of a group does not divide its size, the last parts are padded.
            groups: By group, the devices of the parts.
            is_slot: Whether it is a slot of an optimizer, which is padded by its own values, as an update may divide by
                them. Others are padded by zeros.
        """
        super().__init__(whole, axis)
        self._ways = len(groups[0])
        self.is_placed = not isinstance(whole, NewValue)
        self.shards = tuple(
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

    def bounds(self, index: int) -> tuple[int, int]:
        """See `SplitValue`."""
        size = int(self.shape[self.axis])
        of_part = part_size(size, self._ways)
        begin = min(index % self._ways * of_part, size)
        return begin, min(begin + of_part, size)

    def parts(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...], ColumnVariable]]:
        """See `SplitValue`."""
        places = []
        for rank, shard in enumerate(self.shards[: self._ways]):
            begin, end = self.bounds(rank)
            places.append((self._places(begin, end), self._places(0, end - begin), shard))
        return places

    def _places(self, begin: int, end: int) -> tuple[slice, ...]:
        return tuple(slice(begin, end) if axis == self.axis else slice(None) for axis in range(len(self.shape)))

    def read_value(self) -> tf.Tensor:
        """See `SplitValue`."""
        with tf.device(self.device):
            return self.joined([shard.read_value() for shard in self.shards[: self._ways]])

    def joined(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the complete value of parts of a group, in their order."""
        whole = tf.concat(parts, self.axis)
        size = int(self.shape[self.axis])
        return whole if whole.shape[self.axis] == size else whole[self._places(0, size)]

    def part_of(self, value: tf.Tensor, index: int) -> tf.Tensor:
        """Returns what the part `shards[index]` has of a complete value, and by what it is padded."""
        return self._padded(value[self._places(*self.bounds(index))], index)

    def _padded(self, value: tf.Tensor, index: int) -> tf.Tensor:
        begin, end = self.bounds(index)
        of_part = part_size(int(self.shape[self.axis]), self._ways)
        if end - begin == of_part:
            return value
        return tf.concat([value, self.shards[index].read_value()[self._places(end - begin, of_part)]], self.axis)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> "SplitVariable":
        """See `SplitValue`."""
        del args, kwargs
        whole = tf.cast(value, self.dtype)
        parts = [whole[self._places(*self.bounds(rank))] for rank in range(self._ways)]
        for index, shard in enumerate(self.shards):
            with tf.device(shard.device):
                shard.assign(self._padded(parts[index % self._ways], index))
        return self


def _shard(whole: Any, axis: int, rank: int, device: str, ways: int, *, is_slot: bool) -> ColumnVariable:
    size, shape = int(whole.shape[axis]), part_shape(list(map(int, whole.shape)), axis, ways)
    of_part = shape[axis]
    own_size = max(min(of_part, size - rank * of_part), 0)
    if isinstance(whole, NewValue) and whole.is_constant:
        with tf.init_scope(), tf.device(device):
            value = whole.constant(shape)
            if own_size < of_part and not is_slot:
                value = tf.where(_position(axis, shape) < own_size, value, tf.zeros([], value.dtype))
            return variable_like(whole, device, value)
    with tf.init_scope(), tf.device(whole.device):
        value = whole.read_value()
        begin = [min(rank * of_part, size - 1) if index == axis else 0 for index in range(len(shape))]
        extent = [max(own_size, 1) if index == axis else -1 for index in range(len(shape))]
        value = tf.slice(value, begin, extent)  # of a part without values the last one, to pad it
        if own_size < of_part:
            value = _with_padding(value, axis, own_size, of_part, is_slot=is_slot)
    return variable_like(whole, device, value)


def _position(axis: int, shape: Sequence[int]) -> tf.Tensor:
    """Returns the position along an axis, of a shape that is broadcast."""
    return tf.reshape(tf.range(shape[axis]), [-1 if index == axis else 1 for index in range(len(shape))])


def _with_padding(value: tf.Tensor, axis: int, own_size: int, of_part: int, *, is_slot: bool) -> tf.Tensor:
    last = tf.gather(value, [value.shape[axis] - 1] * (of_part - own_size), axis=axis)
    padding = last if is_slot else tf.zeros_like(last)
    return tf.concat([value, padding], axis) if own_size else padding
