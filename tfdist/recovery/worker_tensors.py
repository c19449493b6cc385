"""Variables on the devices of workers: copied, written into a checkpoint and read there, without being sent here.

All operations are within functions without results: a result would be sent to this process, and an error of an
operation that runs eagerly on another task is raised by a later, unrelated one.

Files are TensorFlow's bundles, which contain checksums of the tensors: `worker-1.index` and
`worker-1.data-00000-of-00001` for the task 1 of the job "worker". Any task reads any of them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpoint import Checkpoint
from tfdist.recovery.host_copies import HostCopies
from tfdist.recovery.worker_calls import call_once, call_workers, host_of, own_task, task_of
from tfdist.tensorflow_internals.split_variables import ShardedVariable
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

Json = dict[str, Any]


@dataclass(frozen=True)
class WorkerTensor:
    """A tensor in a file that a worker wrote. It is read only where it is needed.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        prefix: The path of the files without their endings.
        name: Its name in the files.
        timeout_seconds: How long to wait for a worker that reads it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    prefix: str
    name: str
    timeout_seconds: float

    def read(self) -> tf.Tensor:
        """Adds the operation that reads it, on the device of the present scope, to the function that is traced."""
        return tf.raw_ops.RestoreV2(
            prefix=self.prefix, tensor_names=[self.name], shape_and_slices=[""], dtypes=[tf.as_dtype(self.dtype)]
        )[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy

        @tf.function(autograph=False)
        def read() -> tf.Tensor:
            with tf.device(host_of(own_task())):
                return self.read()

        tensor = call_workers({own_task(): call_once(read)}, "read", self.timeout_seconds)[own_task()]
        array = np.asarray(tensor.numpy())
        return array if dtype is None else array.astype(dtype)


def assign_all(values: Sequence[tuple[Any, Any]]) -> None:
    """Assigns values to `tf.Variable`s.

    Args:
        values: Pairs of a variable and an array, or a `WorkerTensor`, which the task of the variable reads.

    Raises:
        CheckpointError: If a worker is lost, or a file is missing or damaged.
    """
    by_task: dict[str, list[tuple[Any, WorkerTensor]]] = {}
    for variable, value in values:
        if isinstance(value, WorkerTensor):
            by_task.setdefault(task_of(variable.device), []).append((variable, value))
        else:
            variable.assign(value)
    if by_task:
        timeout_seconds = max(value.timeout_seconds for pairs in by_task.values() for _, value in pairs)
        call_workers({task: _assigner(pairs) for task, pairs in by_task.items()}, "read", timeout_seconds)


class WorkerCopies:
    """Copies of variables: of those of this process in host memory, of others on their worker.

    A variable with copies on several workers is copied on the one that has the fewest bytes to write so far.

    Args:
        timeout_seconds: How long to wait for workers that copy or write.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._host_copies = HostCopies()
        self._timeout_seconds = timeout_seconds
        self._known: dict[Any, _Bundle] = {}
        self._requested: dict[str, dict[str, Any]] = {}
        self._bytes: dict[str, int] = {}

    def request(self, name: str, variable: Any) -> np.ndarray | None:
        """Requests a copy, as `HostCopies.request`. Returns None if it will be on a worker.

        Raises:
            ValueError: If parts of the variable are in other processes.
        """
        own = own_task()
        remote = [one for one in (variable, *getattr(variable, "copies", ())) if task_of(one.device) != own]
        if not remote:
            return self._host_copies.request(name, variable)
        if isinstance(variable, ShardedVariable):
            raise ValueError(
                f"FailureRecovery cannot save split variables of other processes. Received: {name!r}, which the layout "
                "map of ModelParallelStrategy splits. Expected: a layout map with devices of one process. Save by "
                "keras.callbacks.ModelCheckpoint instead."
            )
        chosen = min(remote, key=lambda one: self._bytes.get(task_of(one.device), 0))
        task = task_of(chosen.device)
        self._requested.setdefault(task, {})[name] = chosen
        self._bytes[task] = self._bytes.get(task, 0) + _bytes_of(chosen)
        return None

    def finish(self) -> None:
        """Makes the copies in host memory, as `HostCopies.finish`."""
        self._host_copies.finish()

    def copy_on_workers(self) -> "WorkerBundles | None":
        """Makes the requested copies on workers, and returns what they have to write; None if that is nothing.

        Copies nothing: an update of a variable that was read takes new memory.

        Raises:
            CheckpointError: If a worker is lost, or does not answer in time.
        """
        requested, self._requested, self._bytes = self._requested, {}, {}
        if not requested:
            return None
        bundles = {task: self._bundle(task, variables) for task, variables in requested.items()}
        call_workers({task: bundle.copy for task, bundle in bundles.items()}, "write", self._timeout_seconds)
        return WorkerBundles(bundles, self._timeout_seconds)

    def _bundle(self, task: str, variables: dict[str, Any]) -> "_Bundle":
        key = task, tuple((name, id(one)) for name, one in variables.items())
        if key not in self._known:  # a bundle refers to its variables, so that no id is used twice
            self._known[key] = _Bundle(task, variables)
        return self._known[key]


class _Bundle:
    """The variables of one task, their copies there, and the function that writes these.

    Copies are variables, because the results of a function would be sent to this process. They share the memory of
    the variables until these change, and are empty after they were written.
    """

    def __init__(self, task: str, variables: dict[str, Any]) -> None:
        self.variables = list(variables.items())
        self.size_bytes = sum(map(_bytes_of, variables.values()))
        self.has_fixed_size = all(variable.dtype != tf.string for variable in variables.values())
        self._copies: list[tf.Variable] = []
        for variable in variables.values():
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
        for (_, variable), copy in zip(self.variables, self._copies, strict=True):
            with tf.device(variable.device):
                copy.assign(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype), read_value=False)

    def _write(self, prefix: tf.Tensor) -> None:
        values = []
        for (_, variable), copy in zip(self.variables, self._copies, strict=True):
            with tf.device(variable.device):
                values.append(tf.ensure_shape(copy.read_value(), variable.shape))
        with tf.device(self._host):
            names = [name for name, _ in self.variables]
            slices = [""] * len(names)
            written = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=values)
        with tf.control_dependencies([written]):
            for copy in self._copies:
                with tf.device(copy.device):
                    copy.assign(_empty(copy.dtype), read_value=False)


class WorkerBundles:
    """The copies of one snapshot on workers, which write them into the files of a checkpoint.

    Attributes:
        description: By the prefix of files, the names of their tensors with dtype and shape, as JSON.
        size_bytes: The size of all tensors.
    """

    def __init__(self, bundles: dict[str, _Bundle], timeout_seconds: float) -> None:
        self._bundles, self._timeout_seconds = bundles, timeout_seconds
        self.size_bytes = sum(bundle.size_bytes for bundle in bundles.values())
        self.description: Json = {
            _prefix_of(task): {name: [one.dtype.name, list(one.shape)] for name, one in bundle.variables}
            for task, bundle in bundles.items()
        }

    def write(self, directory: Path) -> Mapping[str, int | None]:
        """Makes the workers write, at the same time, and releases the copies; see `WorkerFiles`.

        Raises:
            CheckpointError: If a worker is lost, cannot write or is not ready in time.
        """
        sizes: dict[str, int | None] = {}
        calls = {}
        for task, bundle in self._bundles.items():
            prefix = _prefix_of(task)
            sizes[f"{prefix}.data-00000-of-00001"] = bundle.size_bytes if bundle.has_fixed_size else None
            sizes[f"{prefix}.index"] = None
            calls[task] = _call(bundle, directory / prefix)
        self._bundles = {}
        call_workers(calls, "write", self._timeout_seconds)
        return sizes


def _call(bundle: _Bundle, prefix: Path) -> Callable[[], Any]:
    return lambda: bundle.write(prefix)


def open_worker_tensors(checkpoint: Checkpoint, description: Json, timeout_seconds: float) -> dict[str, WorkerTensor]:
    """Returns the tensors of a checkpoint that workers wrote.

    Args:
        checkpoint: The checkpoint.
        description: That of its `WorkerBundles`.
        timeout_seconds: How long to wait for a worker that reads one.
    """
    return {
        name: WorkerTensor(
            tuple(shape),
            np.dtype(tf.as_dtype(dtype).as_numpy_dtype),
            str((checkpoint.path / prefix).absolute()),
            name,
            timeout_seconds,
        )
        for prefix, tensors in description.items()
        for name, (dtype, shape) in tensors.items()
    }


def _prefix_of(task: str) -> str:
    spec = tf.DeviceSpec.from_string(task)
    return f"{spec.job}-{spec.task}"


def _empty(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(np.zeros([0], dtype.as_numpy_dtype), dtype)  # `tf.zeros` has no float8


def _bytes_of(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


def _assigner(values: Sequence[tuple[Any, WorkerTensor]]) -> Callable[[], Any]:
    """Returns a function that reads on one task and assigns there, one variable after another, to save memory."""

    @tf.function(autograph=False)
    def read_and_assign() -> None:
        last: list[tf.Operation] = []
        for variable, value in values:
            with tf.control_dependencies(last), tf.device(host_of(variable.device)):
                tensor = value.read()
            with tf.device(variable.device):
                variable.assign(tensor, read_value=False)
            last = [tensor.op]

    return call_once(read_and_assign)
