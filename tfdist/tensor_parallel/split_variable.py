"""Variables in parts on the devices of a stage: their axes, as a `LayoutMap` says, their creation, moves and values."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.placed_variables import NewValue, identity_of
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable, PlacedExtended, SplitValue, variable_like


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
        """Splits `whole`, a `tf.Variable` or a `NewValue`, over the devices of each of the `groups`.

        If the number of devices of a group does not divide the size of the axis, the last parts are padded: those of a
        slot of an optimizer by its own values, as an update may divide by them, others by zeros.
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
        """Moves the parts to the devices of each of the `groups`. Returns those that were replaced."""
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
                along_axis = [-1 if index == axis else 1 for index in range(len(shape))]
                is_own = tf.reshape(tf.range(of_part), along_axis) < own_size
                value = tf.where(is_own, value, tf.zeros([], value.dtype))
            return variable_like(whole, device, value)
    with tf.init_scope(), tf.device(whole.device):
        value = whole.read_value()
        begin = [min(rank * of_part, size - 1) if index == axis else 0 for index in range(len(shape))]
        extent = [max(own_size, 1) if index == axis else -1 for index in range(len(shape))]
        value = tf.slice(value, begin, extent)  # of a part without values the last one, to pad it
        if own_size < of_part:
            last = tf.gather(value, [value.shape[axis] - 1] * (of_part - own_size), axis=axis)
            padding = last if is_slot else tf.zeros_like(last)
            value = tf.concat([value, padding], axis) if own_size else padding
    return variable_like(whole, device, value)


class ShardLayout:
    """The split of the variables of a model.

    Attributes:
        ways: The number of parts of a split variable, which is the number of devices of a stage.

    >>> mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], devices=["a", "b"])
    >>> layout_map = keras.distribution.LayoutMap(mesh)
    >>> layout_map["dense/kernel"] = (None, "model")
    >>> layout = ShardLayout(layout_map)
    >>> layout.ways, layout.axis_at("dense/kernel", (4, 6)), layout.axis_at("dense/bias", (6,))
    (2, 1, None)
    """

    def __init__(self, layout_map: Any) -> None:
        """Reads a `keras.distribution.LayoutMap`. The names of its mesh's devices are not used.

        If its layouts use several axes of the mesh, a variable that is split along any of them is split once, over the
        product of their sizes.
        """
        if not isinstance(layout_map, keras.distribution.LayoutMap) or layout_map.device_mesh is None:
            raise ValueError(
                f"Invalid `layout_map`. Received: {layout_map!r}. Expected: a keras.distribution.LayoutMap with a "
                "keras.distribution.DeviceMesh, whose device names may be any."
            )
        mesh = layout_map.device_mesh
        sizes = dict(zip(mesh.axis_names, map(int, mesh.shape), strict=True))
        # Layouts of outputs have no effect.
        of_variables = [key for key in layout_map if any(layout_map[key].axes) and not key.endswith("output")]
        keys = Counter(axis for key in of_variables for axis in layout_map[key].axes if axis is not None)
        # All devices of a stage are one group, over the product of the axes. Of several axes of a variable, that of the
        # mesh's axis in most layouts is split, of equals the later one, so that rows follow columns.
        used = [axis for axis in mesh.axis_names if keys[axis] and sizes[axis] > 1]
        self._preferred = sorted(used, key=lambda axis: (keys[axis], used.index(axis)), reverse=True)
        self.ways = math.prod(sizes[axis] for axis in used)
        self._layout_map = layout_map
        self._unused = {id(layout_map[key]): key for key in of_variables}

    def axis_at(self, path: str, shape: tuple[int, ...]) -> int | None:
        """Returns the axis along which a variable with this path and shape is split, or None."""
        layout = self._layout_map[path]
        self._unused.pop(id(layout), None)
        if layout is None or not set(layout.axes) & set(self._preferred):
            return None
        named = [axis for axis in layout.axes if axis is not None]
        candidates = [layout.axes.index(axis) for axis in self._preferred if axis in named]
        if len(layout.axes) == len(shape) and len(set(named)) == len(named):
            divisible = [index for index in candidates if shape[index] % self.ways == 0]
            if divisible:
                return divisible[0]
            if candidates and len(shape) <= 2 and shape[candidates[0]] >= self.ways:
                return candidates[0]  # whose last parts are padded
        raise ValueError(
            f"A layout does not fit its variable. Received: {tuple(layout.axes)} for {path!r} of shape {shape}, over "
            f"{self.ways} devices. Expected: a layout with an entry for each of the {len(shape)} axes, which names an "
            f"axis of the mesh at most once, and a split axis whose size is at least {self.ways}, the product of all "
            "axes of the mesh that layouts use, and divisible by it if the variable has more than two axes. Change the "
            "layout of this path."
        )

    def shape_of_part(self, variable: Any) -> tuple[int, ...]:
        """Returns the shape of what a device has of a Keras variable. Raises: as `axis_at`."""
        return part_shape(variable.shape, self.axis_at(variable.path, tuple(variable.shape)), self.ways)

    def warn_of_unused_keys(self) -> None:
        """Warns, once, of keys that have matched no path of a variable so far."""
        if self._unused:
            warnings.warn(
                "A layout map has keys that match no variable, so these split nothing. Received: "
                f"{sorted(self._unused.values())}. Expected: complete paths, or regular expressions for them, as "
                "`variable.path` of a built model shows them: those of a Sequential model begin with its name. Write "
                "'.*dense/kernel', or remove the keys; if a model is built again, name its layers or call "
                "`keras.utils.clear_session()` before.",
                stacklevel=2,
            )
        self._unused = {}

    def axes_of(self, variables: Iterable[Any]) -> dict[int, int]:
        """Returns by the id of each split variable its axis."""
        axes = {id(variable): self.axis_at(variable.path, tuple(variable.shape)) for variable in variables}
        return {key: axis for key, axis in axes.items() if axis is not None}


class ShardCreation:
    """Creates the variables that a layout splits on the devices of one stage. `ShardedColumns` moves them later.

    The initial value of a variable is computed once, on one of these devices, and sent in parts; constants, as those of
    slots, are computed in parts. So a device holds one complete variable at most, while it is created.
    """

    def __init__(self, layout: ShardLayout, devices: Sequence[Sequence[str]], extended: PlacedExtended) -> None:
        """Prepares the creation on `devices`, by column and stage; `extended` creates the other variables."""
        self._layout, self._extended = layout, extended
        self._groups = {stages[0]: list(stages) for stages in zip(*devices[: layout.ways], strict=True)}

    def __call__(self, new: NewValue) -> SplitVariable | None:
        """Returns a new variable in parts, or None if it is not split."""
        beside = self._extended.beside
        if beside is not None:
            if not isinstance(beside, SplitVariable) or beside.shape != new.shape:
                return None
            group, axis = [shard.device for shard in beside.shards[: self._layout.ways]], beside.axis
        else:
            try:
                of_layout = self._layout.axis_at(new.path, tuple(new.shape))
            except ValueError:  # which the first step raises if a stage uses the variable
                return None
            if of_layout is None:
                return None
            group, axis = self._groups[self._extended.device_of_next()], of_layout
        new.device = group[0]
        with tf.init_scope():
            variable = SplitVariable(new, axis, [group], is_slot=beside is not None)
        if beside is not None:
            self._extended.colocated_with[identity_of(variable)] = identity_of(beside)
        elif (size := variable.shards[0].shape.num_elements()) is not None:
            self._extended.count_bytes(group[0], size * variable.dtype.size)
        return variable
