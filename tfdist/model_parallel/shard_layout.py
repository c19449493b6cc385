"""Which axis of each variable is split over the devices of a stage, as a `keras.distribution.LayoutMap` says."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

import keras

from tfdist.tensorflow_internals.split_variables import part_size


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
        found = self._layout_map[path]
        self._unused.pop(id(found), None)
        if found is None or not set(found.axes) & set(self._preferred):
            return None
        named = [axis for axis in found.axes if axis is not None]
        candidates = [found.axes.index(axis) for axis in self._preferred if axis in named]
        if len(found.axes) == len(shape) and len(set(named)) == len(named):
            divisible = [index for index in candidates if shape[index] % self.ways == 0]
            if divisible:
                return divisible[0]
            if candidates and len(shape) <= 2 and shape[candidates[0]] >= self.ways:
                return candidates[0]  # whose last parts are padded
        raise ValueError(
            f"A layout does not fit its variable. Received: {tuple(found.axes)} for {path!r} of shape {shape}, over "
            f"{self.ways} devices. Expected: a layout with an entry for each of the {len(shape)} axes, which names an "
            f"axis of the mesh at most once, and a split axis whose size is at least {self.ways}, the product of all "
            "axes of the mesh that layouts use, and divisible by it if the variable has more than two axes. Change the "
            "layout of this path."
        )

    def shape_of_part(self, variable: Any) -> tuple[int, ...]:
        """Returns the shape of what a device has of a Keras variable. Raises: as `axis_at`."""
        axis = self.axis_of(variable)
        return tuple(part_size(size, self.ways) if index == axis else size for index, size in enumerate(variable.shape))

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
        found = {id(variable): self.axis_of(variable) for variable in variables}
        return {key: axis for key, axis in found.items() if axis is not None}
