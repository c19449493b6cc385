"""Which axis of each variable is split over the devices of a stage, as a `keras.distribution.LayoutMap` says."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras


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
            layout_map: A `keras.distribution.LayoutMap` whose layouts split along one axis of its mesh.

        Raises:
            ValueError: It is not a layout map with a mesh, or it splits along several axes of the mesh.
        """
        if not isinstance(layout_map, keras.distribution.LayoutMap) or layout_map.device_mesh is None:
            raise ValueError(
                f"Invalid `layout_map`. Received: {layout_map!r}. Expected: a keras.distribution.LayoutMap with a "
                "keras.distribution.DeviceMesh, whose device names may be any."
            )
        mesh = layout_map.device_mesh
        used = list(dict.fromkeys(axis for key in layout_map for axis in layout_map[key].axes if axis is not None))
        if len(used) > 1:
            raise ValueError(
                f"A layout map splits variables along several axes of its mesh. Received: {used}. Expected: one axis "
                "of the mesh in all layouts. The others are for data (`data_parallel`)."
            )
        self.ways = int(mesh.shape[list(mesh.axis_names).index(used[0])]) if used else 1
        self._layout_map = layout_map
        # Layouts of outputs, which have no effect, are not looked up.
        of_variables = [key for key in layout_map if any(layout_map[key].axes) and not key.endswith("output")]
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
            ValueError: The layout has another rank than the variable, or the axis is not divisible.
        """
        found = self._layout_map[path]
        self._unused.pop(id(found), None)
        if found is None or self.ways == 1 or not any(found.axes):
            return None
        axes = [index for index, axis in enumerate(found.axes) if axis is not None]
        if len(found.axes) != len(shape) or len(axes) != 1 or shape[axes[0]] % self.ways:
            raise ValueError(
                f"A layout does not fit its variable. Received: {tuple(found.axes)} for {path!r} of shape {shape}, "
                f"over {self.ways} devices. Expected: a layout with an entry for each of the {len(shape)} axes, and at "
                f"most one split axis, whose size is divisible by {self.ways}. Change the layout of this path."
            )
        return axes[0]

    def shape_of_part(self, variable: Any) -> tuple[int, ...]:
        """Returns the shape of what a device has of a Keras variable. Raises: as `axis_at`."""
        axis = self.axis_of(variable)
        return tuple(size // self.ways if index == axis else size for index, size in enumerate(variable.shape))

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
