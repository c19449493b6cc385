"""Copies of variables for a checkpoint: in host memory, or on the workers whose devices hold them, which write them.

Functions on workers have no results, as in `worker_tensors.py`. Files are TensorFlow's bundles, which contain checksums
of the tensors: `worker-1.index` and `worker-1.data-00000-of-00001` for the task 1 of the job "worker". Any task reads
any of them. Of a split variable each contains parts, as slices of the complete tensor.
"""

import functools
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.recovery.worker_calls import call_workers, host_of, own_task, task_of
from tfdist.recovery.worker_tensors import TensorSlice, parts_of, slice_spec
from tfdist.tensorflow_internals.placed_strategy import SplitValue
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

Json = dict[str, Any]


class HostCopies:
    """Copies of variables by name. A copy is requested at once and made later, for example by another thread.

    A copy has the value at the time of the request. TensorFlow never writes to memory that was read: an update of a
    variable that is not copied yet takes new memory.

    Memory that the process touches for the first time costs several times the copy itself, so the array of a variable
    is reused for its next copy. Finish using the copies before requesting the next ones.

    >>> import tensorflow as tf
    >>> variable, copies = tf.Variable([1.0, 2.0]), HostCopies()
    >>> first = copies.request("kernel", variable)
    >>> changed = variable.assign_add([1.0, 1.0])
    >>> copies.finish()
    >>> first
    array([1., 2.], dtype=float32)
    >>> again = copies.request("kernel", variable)
    >>> copies.finish()
    >>> again is first, first
    (True, array([2., 3.], dtype=float32))
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._requested: deque[tuple[np.ndarray, np.ndarray]] = deque()

    def request(self, name: str, variable: Any) -> np.ndarray:
        """Returns an array that has the present value of `variable` after `finish`.

        The array of this name is reused if it has the same shape and dtype.
        """
        is_split = isinstance(variable, SplitValue)
        parts = variable.parts() if is_split else [(..., ..., variable)]
        views = [(index, host_view(part)[place]) for index, place, part in parts]
        shape, dtype = tuple(variable.shape) if is_split else views[0][1].shape, views[0][1].dtype
        array = self._arrays.get(name)
        if array is None or (array.shape, array.dtype) != (shape, dtype):
            array = self._arrays[name] = np.empty(shape, dtype)
        self._requested.extend((array[index], view) for index, view in views)
        return array

    def finish(self) -> None:
        """Makes the requested copies, in order, and releases the memory of the variables."""
        while self._requested:
            np.copyto(*self._requested.popleft())


class HostViews:
    """The values of variables for one use: nothing is copied. While a view exists, an update takes new memory.

    See `HostCopies`.

    >>> import tensorflow as tf
    >>> variable = tf.Variable([1.0, 2.0])
    >>> view = HostViews().request("kernel", variable)
    >>> changed = variable.assign_add([1.0, 1.0])
    >>> view
    array([1., 2.], dtype=float32)
    """

    def request(self, name: str, variable: Any) -> np.ndarray:
        """Returns the present value of a `tf.Variable`, which is not split."""
        del name
        return host_view(variable)

    def finish(self) -> None:
        """See `HostCopies`: there is nothing left to do."""


class _Saved(NamedTuple):
    """A `tf.Variable` that a task writes, and what it holds of the tensor of this name and shape."""

    name: str
    variable: Any
    shape: tuple[int, ...]
    part: TensorSlice | None


class WorkerCopies:
    """Copies of variables: those of this process are copied to host memory, others on their worker.

    A variable with copies on several workers is copied on the one that has the fewest bytes to write so far, and so is
    each part of a split one.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._host_copies = HostCopies()
        self._timeout_seconds = timeout_seconds
        self._known: dict[Any, _Bundle] = {}
        self._requested: dict[str, list[_Saved]] = {}
        self._bytes: dict[str, int] = {}

    def request(self, name: str, variable: Any) -> np.ndarray | None:
        """Requests a copy, as `HostCopies.request`. Returns None if it will be on a worker."""
        shards, local_task = list(parts_of(variable)), own_task()
        held = shards if len(shards) > 1 else [(copy, None) for copy in (variable, *getattr(variable, "copies", ()))]
        if all(task_of(copy.device) == local_task for copy, _ in held):
            return self._host_copies.request(name, variable)
        for part in dict.fromkeys(part for _, part in held):
            of_part = [copy for copy, held_part in held if held_part == part]
            # This process writes a part if no worker has it.
            chosen = min(
                [copy for copy in of_part if task_of(copy.device) != local_task] or of_part,
                key=lambda copy: self._bytes.get(task_of(copy.device), 0),
            )
            task = task_of(chosen.device)
            self._requested.setdefault(task, []).append(_Saved(name, chosen, tuple(variable.shape), part))
            self._bytes[task] = self._bytes.get(task, 0) + _bytes_of(chosen)
        return None

    def finish(self) -> None:
        """Makes the copies in host memory, as `HostCopies.finish`."""
        self._host_copies.finish()

    def copy_on_workers(self) -> "WorkerBundles | None":
        """Makes the requested copies on workers, and returns what they have to write; None if that is nothing.

        Copies nothing: an update of a variable that was read takes new memory.
        """
        requested, self._requested, self._bytes = self._requested, {}, {}
        if not requested:
            return None
        bundles = {task: self._bundle(task, saved) for task, saved in requested.items()}
        call_workers({task: bundle.copy for task, bundle in bundles.items()}, "write", self._timeout_seconds)
        return WorkerBundles(bundles, self._timeout_seconds)

    def _bundle(self, task: str, saved: list[_Saved]) -> "_Bundle":
        key = task, tuple((entry.name, id(entry.variable)) for entry in saved)
        if key not in self._known:  # a bundle refers to its variables, so that no id is used twice
            self._known[key] = _Bundle(task, saved)
        return self._known[key]


class _Bundle:
    """The variables of one task, their copies there, and the function that writes these.

    Copies are variables, because the results of a function would be sent to this process. They share the memory of
    the variables until these change, and are empty after they were written.
    """

    def __init__(self, task: str, saved: list[_Saved]) -> None:
        self.saved = saved
        self.size_bytes = sum(_bytes_of(entry.variable) for entry in saved)
        self.has_fixed_size = all(entry.variable.dtype != tf.string for entry in saved)
        self._copies: list[tf.Variable] = []
        for variable in (entry.variable for entry in saved):
            with tf.init_scope(), tf.device(variable.device):
                empty = ResourceVariable(_empty(variable.dtype), trainable=False, shape=tf.TensorShape(None))
                self._copies.append(empty)
        self._host = host_of(task)

    def copy(self) -> None:
        """Copies the variables."""
        self.traced_copy()

    def write(self, prefix: Path) -> None:
        """Writes the copies, and empties them."""
        self._traced_write(tf.constant(str(prefix)))

    @functools.cached_property
    def traced_copy(self) -> Any:
        """The function that copies. It is traced in the thread that calls it first."""
        return tf.function(self._copy, autograph=False).get_concrete_function()

    @functools.cached_property
    def _traced_write(self) -> Any:
        return tf.function(self._write, autograph=False).get_concrete_function(tf.TensorSpec([], tf.string))

    def _copy(self) -> None:
        for (_, variable, *_), copy in zip(self.saved, self._copies, strict=True):
            with tf.device(variable.device):
                copy.assign(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype), read_value=False)

    def _write(self, prefix: tf.Tensor) -> None:
        values = []
        for (_, variable, _, part), copy in zip(self.saved, self._copies, strict=True):
            with tf.device(variable.device):
                values.append(_without_padding(tf.ensure_shape(copy.read_value(), variable.shape), part))
        with tf.device(self._host):
            names = [entry.name for entry in self.saved]
            slices = [slice_spec(entry.shape, entry.part) for entry in self.saved]
            written = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=values)
        with tf.control_dependencies([written]):
            for copy in self._copies:
                with tf.device(copy.device):
                    copy.assign(_empty(copy.dtype), read_value=False)


class WorkerBundles:
    """The copies of one snapshot on workers, which write them into the files of a checkpoint."""

    def __init__(self, bundles: dict[str, _Bundle], timeout_seconds: float) -> None:
        self._bundles, self._timeout_seconds = bundles, timeout_seconds
        self.size_bytes = sum(bundle.size_bytes for bundle in bundles.values())
        # For each prefix of files the names of their tensors, with dtype and shape, and with the parts that are there
        # if a tensor is split.
        self.description: Json = {_prefix_of(task): _described(bundle.saved) for task, bundle in bundles.items()}

    def write(self, directory: Path) -> Mapping[str, int | None]:
        """Makes the workers write, at the same time, and releases the copies; see `WorkerFiles`."""
        sizes: dict[str, int | None] = {}
        calls = {}
        for task, bundle in self._bundles.items():
            prefix = _prefix_of(task)
            sizes[f"{prefix}.data-00000-of-00001"] = bundle.size_bytes if bundle.has_fixed_size else None
            sizes[f"{prefix}.index"] = None
            calls[task] = functools.partial(bundle.write, directory / prefix)
        self._bundles = {}
        call_workers(calls, "write", self._timeout_seconds)
        return sizes


def _without_padding(value: tf.Tensor, part: TensorSlice | None) -> tf.Tensor:
    if part is None or part.end - part.begin == value.shape[part.axis]:
        return value
    return value[tuple(slice(part.end - part.begin if axis == part.axis else None) for axis in range(len(value.shape)))]


def _described(saved: list[_Saved]) -> Json:
    description: Json = {}
    for name, variable, shape, part in saved:
        entry = description.setdefault(name, [variable.dtype.name, list(shape)])
        if part is not None:  # in the order of a `TensorSlice`
            entry[2:] = [[*(entry[2] if len(entry) > 2 else []), [part.axis, part.begin, part.end]]]
    return description


def _prefix_of(task: str) -> str:
    spec = tf.DeviceSpec.from_string(task)
    return f"{spec.job}-{spec.task}"


def _empty(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(np.zeros([0], dtype.as_numpy_dtype), dtype)  # `tf.zeros` has no float8


def _bytes_of(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def host_view(variable: Any) -> np.ndarray:
    """Returns the value: a view of the variable's memory if NumPy can read it, a copy from other devices (GPU, TPU)."""
    if "/job:localhost/" in variable.device and "CPU" in variable.device and hasattr(variable, "handle"):
        value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)  # a third of the time
    else:  # on a server or a TPU, the variable itself knows how it is read
        value = variable.read_value()
    if "CPU" in value.device:
        try:
            return np.asarray(memoryview(value))
        except (ValueError, TypeError, BufferError):  # buffers have no format for bfloat16 and float8
            pass
    return np.asarray(value.numpy())
