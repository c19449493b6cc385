"""Variables that are split over the devices of a stage: their axes, as a `LayoutMap` says, and their creation."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.placed_variables import NewValue, identity_of
from tfdist.tensor_parallel.split_variable import SplitVariable, part_shape
from tfdist.tensorflow_internals.placed_strategy import PlacedExtended


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
        """Reads a layout map. The names of its mesh's devices are not used.

        Args:
            layout_map: A `keras.distribution.LayoutMap`. If its layouts use several axes of the mesh, a variable that
                is split along any of them is split once, over the product of their sizes.

        Raises:
            ValueError: It is not a layout map with a mesh.
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

    def axis_of(self, variable: Any) -> int | None:
        """Returns the axis along which a Keras variable is split; None if each device holds all of it.

        Raises:
            ValueError: As `axis_at`.
        """
        return self.axis_at(variable.path, tuple(variable.shape))

    def axis_at(self, path: str, shape: tuple[int, ...]) -> int | None:
        """Returns the axis along which a variable with this path and shape is split, or None.

        Raises:
            ValueError: The layout has another rank than the variable, or no axis that it names can be split.
        """
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
        return part_shape(variable.shape, self.axis_of(variable), self.ways)

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
        axes = {id(variable): self.axis_of(variable) for variable in variables}
        return {key: axis for key, axis in axes.items() if axis is not None}


class ShardCreation:
    """Creates the variables that a layout splits on the devices of one stage. `ShardedColumns` moves them later.

    The initial value of a variable is computed once, on one of these devices, and sent in parts; constants, as those of
    slots, are computed in parts. So a device holds one complete variable at most, while it is created.
    """

    def __init__(self, layout: ShardLayout, devices: Sequence[Sequence[str]], extended: PlacedExtended) -> None:
        """Prepares the creation.

        Args:
            layout: Which variables are split.
            devices: By column and stage.
            extended: Where other variables are created.
        """
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
            of_layout = self._axis(new)
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

    def _axis(self, new: NewValue) -> int | None:
        try:
            return self._layout.axis_at(new.path, tuple(new.shape))
        except ValueError:  # which the first step raises if a stage uses the variable
            return None
