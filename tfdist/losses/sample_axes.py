"""Operations that move, select, repeat or join elements: where the samples lie afterwards."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.losses.sample_kinds import ZERO, Kind, mean_over_samples, sum_of, unknown

_ARITHMETIC = {"AddV2": np.add, "Sub": np.subtract, "FloorMod": np.mod, "Mul": np.multiply}
Rule = Callable[[tf.Tensor, Sequence[Kind]], Kind]


def static(tensor: Any) -> Any:
    """Returns the value of a tensor as an array of objects, with `None` for elements that are not constants.

    Gradients compute axes from constants by operations that TensorFlow does not evaluate while it traces.
    """
    value = tf.get_static_value(tensor, partial=True)
    if value is None and getattr(tensor, "op", None) is not None and tensor.op.type in _ARITHMETIC:
        operands = [static(input_tensor) for input_tensor in tensor.op.inputs]
        if all(operand is not None and None not in operand.ravel() for operand in operands):
            value = _ARITHMETIC[tensor.op.type](*(operand.astype(np.int64) for operand in operands))
    if value is None:
        return None
    value = np.asarray(value, dtype=object)
    if value.ndim == 1 and tensor.op.type == "Pack":
        value[:] = [
            _number(element) if known is None else known for element, known in zip(tensor.op.inputs, value, strict=True)
        ]
    return value


def _number(tensor: tf.Tensor) -> Any:
    value = static(tensor)
    return value.item() if value is not None and value.size == 1 else None


def is_whole(size: int | None, samples: int | None) -> bool:
    """Whether an axis of this static size may hold batches of a static number of `samples`."""
    return size is None or samples is not None and samples > 0 and size > 0 and size % samples == 0


def grows(degree: float | None) -> bool:
    """Whether a size of this degree depends on the number of samples."""
    return degree not in (0, ZERO)


def reshape(samples: int | None, tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """The samples' axis is the one whose new size is their number, or -1; else the one with as many values before it.

    Args:
        samples: The number of samples, if it is static. The samples' axis may hold several values of each, which a
            layer on sequences joins and separates again.
        tensor: The result.
        kinds: The kinds of the operands.
    """
    kind, sizes = kinds[0], kinds[1].sizes
    shape, before = static(tensor.op.inputs[1]), tensor.op.inputs[0].shape
    growing = [axis for axis, size in enumerate(sizes or ()) if grows(size)]
    if not kind.axes:
        if growing:
            return unknown(kinds, growing)
        return dataclasses.replace(kind, sizes=None if shape is None else kind.sizes)
    if len(kind.axes) > 1 or len(growing) > 1 or tensor.shape.rank is None:
        return unknown(kinds, growing[:1] or [0])
    if growing:
        return kind.at(growing)
    if shape is not None and -1 in shape:
        return kind.at([list(shape).index(-1)])
    (axis,) = kind.axes
    if before.is_fully_defined() and tensor.shape.is_fully_defined():
        earlier = [int(np.prod(tensor.shape[:place])) for place in range(tensor.shape.rank)]
        wanted = int(np.prod(before[:axis]))
        places = [
            place
            for place, size in enumerate(earlier)
            if size == wanted
            and (tensor.shape[place] % before[axis] == 0 or _separates(tensor.shape[place:], before[axis], samples))
        ]
        return kind.at(places[-1:]) if places else unknown(kinds, [0])
    if sizes is not None and tensor.op.inputs[0].op.type == "Sum":
        return mean_over_samples(kind, is_sum=True)  # a gradient, summed to the shape of a weight
    return unknown(kinds, [0])


def _separates(sizes: Sequence[int], joined: int, samples: int | None) -> bool:
    """Whether an axis of size `joined` becomes one of whole batches, the first of `sizes`, and axes after it."""
    return is_whole(sizes[0], samples) and joined in np.cumprod(list(sizes))


def _transpose(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    order = static(tensor.op.inputs[1])
    if order is None:
        return unknown(kinds, kinds[0].axes) if kinds[0].axes else kinds[0]
    places = [int(axis) % len(order) for axis in order]
    return kinds[0].at(places.index(axis) for axis in kinds[0].axes)


def _expand(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    place = static(tensor.op.inputs[1])
    if place is None or tensor.shape.rank is None:
        return unknown(kinds, kinds[0].axes) if kinds[0].axes else kinds[0]
    new = int(place.ravel()[0]) % tensor.shape.rank
    return kinds[0].at(axis + (axis >= new) for axis in kinds[0].axes)


def _squeeze(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    shape, gone = tensor.op.inputs[0].shape, tensor.op.get_attr("squeeze_dims")
    if shape.rank is None:
        return unknown(kinds, kinds[0].axes) if kinds[0].axes else kinds[0]
    removed = {axis % shape.rank for axis in gone} or {axis for axis, size in enumerate(shape) if size == 1}
    if removed & kinds[0].axes:
        return unknown(kinds)
    return kinds[0].at(_without(kinds[0].axes, removed))


def _without(axes: frozenset[int], removed: set[int]) -> list[int]:
    return [axis - sum(1 for gone in removed if gone < axis) for axis in axes - removed]


def _pack(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    if tensor.shape.rank == 1 and tensor.dtype.is_integer:
        return vector([kind.degree for kind in kinds])
    new = tensor.op.get_attr("axis") % (tensor.shape.rank or 1)
    return sum_of(kinds, {axis + (axis >= new) for kind in kinds for axis in kind.axes})


def _unpack(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    kind, rank = kinds[0], tensor.op.inputs[0].shape.rank
    if kind.sizes is not None:
        return Kind(degree=kind.sizes[tensor.value_index])
    gone = tensor.op.get_attr("axis") % (rank or 1)
    return unknown(kinds) if gone in kind.axes else kind.at(_without(kind.axes, {gone}))


def _concat(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """Batches that are joined along the axis of the samples become blocks; joined with others they become unknown."""
    pieces = kinds[:-1]
    if all(kind.sizes is not None for kind in pieces):
        return vector([size for kind in pieces for size in kind.sizes or ()])
    axes = frozenset().union(*(kind.axes for kind in pieces))
    place, rank = static(tensor.op.inputs[-1]), tensor.shape.rank
    if not axes:
        return sum_of(pieces)
    if place is None or rank is None:
        return unknown(pieces, axes)
    if int(place.ravel()[0]) % rank not in axes:
        return sum_of(pieces, axes)
    if any(kind.axes != axes for kind in pieces):
        return unknown(pieces, axes)
    joined = sum_of([dataclasses.replace(kind, blocks=1) for kind in pieces], axes)
    return dataclasses.replace(joined, blocks=sum(kind.blocks or 1 for kind in pieces))


def _split(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    operation = tensor.op
    value, axis = (1, 0) if operation.type == "Split" else (0, 2)
    kind, place, rank = kinds[value], static(operation.inputs[axis]), operation.inputs[value].shape.rank
    if not kind.axes:
        return dataclasses.replace(kind, sizes=None)
    if place is None or rank is None:
        return unknown(kinds, kind.axes)
    if int(place.ravel()[0]) % rank not in kind.axes:
        return kind.at(kind.axes)
    parts = len(operation.outputs)
    is_by_blocks = operation.type == "Split" or (kinds[1].sizes is not None and all(map(grows, kinds[1].sizes)))
    if kind.blocks % parts or not is_by_blocks or kind.blocks == 1 < parts:
        return unknown(kinds, kind.axes)
    return kind.at(kind.axes, kind.blocks // parts)


def _pad(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    added = static(tensor.op.inputs[1])
    if any(added is None or added[axis].tolist() != [0, 0] for axis in kinds[0].axes):
        return unknown(kinds, kinds[0].axes)
    return sum_of([kinds[0], *kinds[2:]], kinds[0].axes) if len(kinds) > 2 else kinds[0].at(kinds[0].axes)


def _tile(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    kind, sizes = kinds[0], kinds[1].sizes
    times = static(tensor.op.inputs[1])
    growing = {axis for axis, size in enumerate(sizes or ()) if grows(size)}
    if len(growing | kind.axes) > 1 or growing & kind.axes:
        return unknown(kinds, growing | kind.axes)
    if not kind.axes:
        return kind.at(growing, 0)
    factor = None if times is None else times[next(iter(kind.axes))]
    return unknown(kinds, kind.axes) if factor is None else kind.at(kind.axes, kind.blocks * int(factor))


def _broadcast(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    kind, sizes, rank = kinds[0], kinds[1].sizes, tensor.shape.rank
    shift = (rank or 0) - (tensor.op.inputs[0].shape.rank or 0)
    axes = {axis + shift for axis in kind.axes} | {axis for axis, size in enumerate(sizes or ()) if grows(size)}
    if len(axes) > 1 or rank is None or (kind.axes and sizes is None and not tensor.shape.is_fully_defined()):
        return unknown(kinds, axes or kind.axes)
    return kind.at(axes, None if kind.axes else 0)


def _reverse(tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
    """Reversing, rolling and cumulative sums mix the elements along an axis, so along the samples nothing is known."""
    axes, rank = static(tensor.op.inputs[-1]), tensor.shape.rank
    if kinds[0].axes and (axes is None or rank is None or {int(axis) % rank for axis in axes.ravel()} & kinds[0].axes):
        return unknown(kinds, kinds[0].axes)
    return kinds[0].at(kinds[0].axes)


def vector(sizes: Sequence[float | None]) -> Kind:
    """The kind of a vector of whole numbers."""
    distinct = {0 if size == ZERO else size for size in sizes}
    return Kind(degree=distinct.pop() if len(distinct) == 1 else None if distinct else 0, sizes=tuple(sizes))


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


RULES: dict[str, Rule] = {
    "Transpose": _transpose,
    "ExpandDims": _expand,
    "Squeeze": _squeeze,
    "Pack": _pack,
    "Unpack": _unpack,
    "ConcatV2": _concat,
    "Split": _split,
    "SplitV": _split,
    "Pad": _pad,
    "PadV2": _pad,
    "MirrorPad": _pad,
    "Tile": _tile,
    "BroadcastTo": _broadcast,
    "ReverseV2": _reverse,
    "Roll": _reverse,
    "Cumsum": _reverse,
    "GatherV2": _gather,
    "ResourceGather": _gather,
    "StridedSlice": _strided_slice,
}
