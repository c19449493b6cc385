"""Tensors that workers have written into a checkpoint: read where their variables are, without being sent here.

All operations are within functions without results: a result would be sent to this process, and an error of an
operation that runs eagerly on another task is raised by a later, unrelated one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpoint import Checkpoint
from tfdist.recovery.worker_calls import call_once, call_workers, host_of, own_task, task_of
from tfdist.tensorflow_internals.placed_strategy import SplitValue


@dataclass(frozen=True)
class TensorSlice:
    """The elements of a tensor from `begin` to before `end` along one axis, and all elements along the others."""

    axis: int
    begin: int
    end: int


def slice_spec(shape: Sequence[int], *parts: TensorSlice | None) -> str | None:
    """Returns the intersection of parts of a tensor as `SaveV2` and `RestoreV2` take it; None if it has no elements.

    A part of None is all of it.

    >>> slice_spec([8, 16], TensorSlice(1, 0, 8))
    '8 16 -:0,8'
    >>> slice_spec([8, 16], TensorSlice(1, 0, 8), TensorSlice(0, 4, 8))
    '8 16 4,4:0,8'
    >>> slice_spec([8, 16], TensorSlice(1, 0, 8), TensorSlice(1, 8, 16)) is None
    True
    >>> slice_spec([8, 16], None)
    ''
    """
    ranges = [(0, size) for size in shape]
    known = [part for part in parts if part is not None]
    for part in known:
        begin, end = ranges[part.axis]
        ranges[part.axis] = max(begin, part.begin), min(end, part.end)
        if ranges[part.axis][0] >= ranges[part.axis][1]:
            return None
    if not known:
        return ""
    pairs = zip(ranges, shape, strict=True)
    texts = ["-" if (begin, end) == (0, size) else f"{begin},{end - begin}" for (begin, end), size in pairs]
    return f"{' '.join(map(str, shape))} {':'.join(texts)}"


Json = dict[str, Any]


@dataclass(frozen=True)
class WrittenPart:
    """What a worker has written of a tensor."""

    prefix: str  # the path of its files without their endings
    part: TensorSlice | None  # which part of the tensor is there; None for all of it


@dataclass(frozen=True)
class WorkerTensor:
    """A tensor in files that workers wrote. It is read only where it is needed."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    written: tuple[WrittenPart, ...]  # its parts, in the order of their positions along the axis of all of them
    name: str  # its name in the files
    timeout_seconds: float  # how long to wait for a worker that reads it

    def read(self, part: TensorSlice | None = None) -> tf.Tensor:
        """Adds the operations that read it, on the device of the present scope, to the function that is traced.

        It may be split in another way in the files.
        """
        tensors = []
        for written in self.written:
            spec = slice_spec(self.shape, written.part, part)
            if spec is not None:
                tensors += tf.raw_ops.RestoreV2(
                    prefix=written.prefix,
                    tensor_names=[self.name],
                    shape_and_slices=[spec],
                    dtypes=[tf.as_dtype(self.dtype)],
                )
        if len(tensors) == 1:
            return tensors[0]
        first = self.written[0].part
        assert first is not None
        return tf.concat(tensors, first.axis)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy

        @tf.function(autograph=False)
        def read() -> tf.Tensor:
            with tf.device(host_of(own_task())):
                return self.read()

        tensor = call_workers({own_task(): call_once(read)}, "read", self.timeout_seconds)[own_task()]
        array = np.asarray(tensor.numpy())
        return array if dtype is None else array.astype(dtype)


def parts_of(variable: Any) -> Iterator[tuple[Any, TensorSlice | None]]:
    """Yields the `tf.Variable`s of a variable with what they hold: all shards of a split one, also equal ones."""
    if not isinstance(variable, SplitValue):
        yield variable, None
        return
    for index, shard in enumerate(variable.shards):
        begin, end = variable.bounds(index)
        if begin < end:  # else it is padding alone
            yield shard, TensorSlice(variable.axis, begin, end)


def assign_all(values: Sequence[tuple[Any, Any]]) -> None:
    """Assigns values to `tf.Variable`s.

    A `WorkerTensor` is read by the task of its variable. Each shard of a split variable is assigned its part.

    Raises:
        CheckpointError: If a worker is lost, or a file is missing or damaged.
    """
    by_task: dict[str, list[tuple[Any, WorkerTensor, TensorSlice | None]]] = {}
    for variable, value in values:
        if isinstance(value, WorkerTensor):
            for component, part in parts_of(variable):
                by_task.setdefault(task_of(component.device), []).append((component, value, part))
        else:
            variable.assign(value)
    if by_task:
        timeout_seconds = max(value.timeout_seconds for task_values in by_task.values() for _, value, _ in task_values)
        call_workers({task: _assigner(task_values) for task, task_values in by_task.items()}, "read", timeout_seconds)


def multiply(variables: Sequence[Any], factor: float) -> None:
    """Multiplies `tf.Variable`s, or the shards of split ones, where they are."""
    if factor == 1.0:
        return
    for component in (component for variable in variables for component, _ in parts_of(variable)):
        with tf.device(component.device):
            component.assign(component.read_value() * tf.constant(factor, component.dtype))


def open_worker_tensors(checkpoint: Checkpoint, description: Json, timeout_seconds: float) -> dict[str, WorkerTensor]:
    """Returns the tensors of a checkpoint that workers wrote."""
    written: dict[str, list[WrittenPart]] = {}
    kinds: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    for prefix, tensors in description.items():
        path = str((checkpoint.path / prefix).absolute())
        for name, (dtype, shape, *parts) in tensors.items():
            kinds[name] = tuple(shape), np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
            # Earlier releases wrote complete tensors only.
            written_parts = (
                [WrittenPart(path, TensorSlice(*part)) for part in parts[0]] if parts else [WrittenPart(path, None)]
            )
            written.setdefault(name, []).extend(written_parts)
    return {
        name: WorkerTensor(*kinds[name], tuple(sorted(written_parts, key=_position)), name, timeout_seconds)
        for name, written_parts in written.items()
    }


def _position(written: WrittenPart) -> int:
    return 0 if written.part is None else written.part.begin


def _with_padding(variable: Any, value: tf.Tensor, part: TensorSlice | None) -> tf.Tensor:
    """Returns a value that is read, followed by the padding that its part of a split variable has."""
    if part is None or part.end - part.begin == variable.shape[part.axis]:
        return value
    places = [slice(part.end - part.begin if axis == part.axis else None, None) for axis in range(len(variable.shape))]
    return tf.concat([value, variable.read_value()[tuple(places)]], part.axis)


def _assigner(values: Sequence[tuple[Any, WorkerTensor, TensorSlice | None]]) -> Callable[[], Any]:
    """Returns a function that reads on one task and assigns there, one variable after another, to save memory."""

    @tf.function(autograph=False)
    def read_and_assign() -> None:
        last: list[tf.Operation] = []
        for variable, value, part in values:
            with tf.control_dependencies(last), tf.device(host_of(variable.device)):
                tensor = value.read(part)
            with tf.device(variable.device):
                variable.assign(_with_padding(variable, tensor, part), read_value=False)
            last = [tensor.op]

    return call_once(read_and_assign)
