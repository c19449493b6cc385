"""Operations that select elements, by slices and by numbers: whether they keep all samples."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.losses.sample_axes import Rule, grows, static, vector
from tfdist.losses.sample_kinds import Kind, sum_of, unknown


def _gather(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """Rows of a table by the samples' numbers are values of the samples; samples by their numbers are not."""
    operation = tensor.op
    table, places = kinds[0], kinds[1]
    is_resource = operation.inputs[0].dtype == tf.resource
    if table.sizes is not None:
        return _of_vector(table, static(operation.inputs[1]), tensor)
    axis = np.zeros(1, object) if len(operation.inputs) < 3 else static(operation.inputs[2])
    rank = tensor.shape.rank if is_resource else operation.inputs[0].shape.rank
    indexed, batch = operation.inputs[1].shape.rank, operation.get_attr("batch_dims")
    if axis is None or rank is None or indexed is None:
        return unknown(kinds, table.axes | places.axes) if table.axes or places.axes else table
    at = int(axis.ravel()[0]) % max(rank, 1)
    if places.is_reduced or places.degree is None or (at in table.axes and at >= batch):
        return unknown(kinds, [0])
    axes = {at + sample_axis - batch if sample_axis >= batch else sample_axis for sample_axis in places.axes}
    axes |= {sample_axis if sample_axis < at else sample_axis + indexed - batch - 1 for sample_axis in table.axes}
    if len(axes) > 1:
        return unknown(kinds, axes)
    gathered = sum_of([table], axes)
    return dataclasses.replace(
        gathered, is_trained=gathered.is_trained or is_resource, blocks=max(table.blocks, places.blocks) if axes else 1
    )


def _of_vector(kind: Kind, places: Any, tensor: tf.Tensor) -> Kind:
    """The kind of elements of a vector, or of one."""
    sizes = kind.sizes or ()
    if places is None or None in places.ravel():
        return Kind(degree=0) if not any(map(grows, sizes)) else unknown([kind])
    elements = [sizes[int(place) % len(sizes)] for place in places.ravel()]
    return vector(elements) if tensor.shape.rank else Kind(degree=elements[0])


def _strided_slice(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """A slice of all samples, or of one of several blocks, keeps them; one of some samples does not."""
    operation, kind = tensor.op, kinds[0]
    begin, end, strides = (static(given) for given in operation.inputs[1:4])
    mask = {
        name: operation.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    if kind.sizes is not None and begin is not None and strides is not None:
        return _slice_of_vector(kind, begin, end, strides, mask, tensor)
    rank = operation.inputs[0].shape.rank
    if not kind.axes:
        return dataclasses.replace(kind, sizes=None)
    if rank is None or strides is None:
        return unknown(kinds, kind.axes)
    count = len(strides)
    given = sum(1 for place in range(count) if not (mask["new_axis"] | mask["ellipsis"]) >> place & 1)
    axis = new = 0
    moved: dict[int, int] = {}
    for place in range(count):
        if mask["ellipsis"] >> place & 1:
            for _ in range(rank - given):
                moved[axis], axis, new = new, axis + 1, new + 1
        elif mask["new_axis"] >> place & 1:
            new += 1
        elif axis in kind.axes:
            whole = not mask["shrink_axis"] >> place & 1 and _takes_blocks(place, (begin, end, strides), mask, kinds)
            if not whole:
                return unknown(kinds, kind.axes & {0} if tensor.shape.rank else ())
            moved[axis], axis, new = new, axis + 1, new + 1
        else:
            is_gone = mask["shrink_axis"] >> place & 1
            moved[axis], axis, new = new, axis + 1, new + (not is_gone)
    for _ in range(rank - axis):
        moved[axis], axis, new = new, axis + 1, new + 1
    if len(kind.axes) > 1:
        return unknown(kinds, kind.axes)
    place = next(iter(kind.axes))
    return kind.at(
        [moved[place]], 1 if kind.blocks != 1 and not _is_everything(place, operation, mask) else kind.blocks
    )


def _takes_blocks(place: int, bounds: Sequence[Any], mask: dict[str, int], kinds: Sequence[Kind]) -> bool:
    begin, end, strides = bounds
    starts = bool(mask["begin"] >> place & 1) or (begin is not None and begin[place] == 0)
    ends = bool(mask["end"] >> place & 1)
    if strides[place] != 1:
        return False
    if starts and ends:
        return True
    counts = [kind.sizes is not None and grows(kind.sizes[place]) for kind in kinds[1:3]]
    return kinds[0].blocks != 1 and (starts or counts[0]) and (ends or counts[1])


def _is_everything(axis: int, operation: Any, mask: dict[str, int]) -> bool:
    if axis:
        return True
    starts = static(operation.inputs[1])
    return bool(mask["end"] & 1) and (bool(mask["begin"] & 1) or (starts is not None and starts[0] == 0))


def _slice_of_vector(kind: Kind, begin: Any, end: Any, strides: Any, mask: dict[str, int], tensor: tf.Tensor) -> Kind:
    sizes = kind.sizes or ()
    if mask["shrink_axis"] & 1:
        return _of_vector(kind, begin[:1], tensor)
    first = None if mask["begin"] & 1 else begin[0]
    last = None if mask["end"] & 1 or end is None else end[0]
    if mask["new_axis"] or mask["ellipsis"] or (last is None and not mask["end"] & 1):
        return unknown([kind]) if any(map(grows, sizes)) else Kind()
    return vector(sizes[slice(first, last, strides[0])])


RULES: dict[str, Rule] = {"GatherV2": _gather, "ResourceGather": _gather, "StridedSlice": _strided_slice}
