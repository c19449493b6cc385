"""Variables on the devices of workers: copied, written into a checkpoint and read there, without being sent here.

Files are TensorFlow's bundles, which contain checksums of the tensors: `worker-1.index` and
`worker-1.data-00000-of-00001` for the task 1 of the job "worker". Any task reads any of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpoint import Checkpoint
from tfdist.recovery.host_copies import HostCopies
from tfdist.recovery.worker_calls import call_workers, host_of, own_task, task_of

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

    def read(self, device: str) -> tf.Tensor:
        """Reads it on the task of `device`, where the result stays.

        Raises:
            CheckpointError: If the worker is lost, or the file is missing or damaged.
        """
        task = task_of(device)

        def call() -> tf.Tensor:
            return _reader(host_of(device), self.dtype)(tf.constant(self.prefix), tf.constant(self.name))

        return call_workers({task: call}, "read", self.timeout_seconds)[task]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        array = np.asarray(self.read(f"{own_task()}/device:CPU:0").numpy())
        return array if dtype is None else array.astype(dtype)


def assign(variable: Any, value: Any) -> None:
    """Assigns to a `tf.Variable` an array, or a `WorkerTensor`, which the task of the variable reads."""
    if not isinstance(value, WorkerTensor):
        variable.assign(value)
        return
    tensor = value.read(variable.device)
    with tf.device(variable.device):
        variable.assign(tensor)


class WorkerCopies:
    """Copies of variables: of those of this process in host memory, of others on their worker.

    A variable with copies on several workers is copied on the one that has the fewest bytes to write so far.

    Args:
        timeout_seconds: How long to wait for workers that copy or write.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._host_copies = HostCopies()
        self._timeout_seconds = timeout_seconds
        self._functions: dict[Any, Any] = {}
        self._requested: dict[str, dict[str, Any]] = {}
        self._bytes: dict[str, int] = {}

    def request(self, name: str, variable: Any) -> np.ndarray | None:
        """Requests a copy, as `HostCopies.request`. Returns None if it will be on a worker."""
        own = own_task()
        remote = [one for one in (variable, *getattr(variable, "copies", ())) if task_of(one.device) != own]
        if not remote:
            return self._host_copies.request(name, variable)
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
        calls = {}
        for task, variables in requested.items():
            key = task, tuple((name, id(one)) for name, one in variables.items())
            if key not in self._functions:  # the functions refer to their variables, so that no id is used twice
                self._functions[key] = _copier(list(variables.values())), _writer(task, list(variables))
            calls[task] = self._functions[key][0]
        values = call_workers(calls, "write", self._timeout_seconds)
        bundles = {}
        for task, variables in requested.items():
            key = task, tuple((name, id(one)) for name, one in variables.items())
            bundles[task] = _Bundle(list(variables.items()), values[task], self._functions[key][1])
        return WorkerBundles(bundles, self._timeout_seconds)


@dataclass
class _Bundle:
    """What one task writes: the variables with their names, their values, and the function that writes these."""

    variables: list[tuple[str, Any]]
    values: list[tf.Tensor]
    write: Any

    @property
    def size_bytes(self) -> int:
        return sum(_bytes_of(variable) for _, variable in self.variables)


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
            sizes[f"{prefix}.data-00000-of-00001"] = bundle.size_bytes
            sizes[f"{prefix}.index"] = None
            calls[task] = _call(bundle, directory / prefix)
        self._bundles = {}
        call_workers(calls, "write", self._timeout_seconds)
        return sizes


def _call(bundle: _Bundle, prefix: Path) -> Callable[[], Any]:
    return lambda: bundle.write(tf.constant(str(prefix)), bundle.values).numpy()


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


def _bytes_of(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)


# Operations within functions. One that runs eagerly on another task returns at once, an error of it is raised by a
# later operation, and a question for the shape of its result waits for the task while it holds Python's lock.


def _copier(variables: list[Any]) -> Any:
    @tf.function(autograph=False)
    def copy() -> list[tf.Tensor]:
        values = []
        for variable in variables:
            with tf.device(variable.device):
                values.append(tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype))
        return values

    return copy


def _writer(task: str, names: list[str]) -> Any:
    @tf.function(autograph=False)
    def write(prefix: tf.Tensor, tensors: list[tf.Tensor]) -> tf.Tensor:
        with tf.device(host_of(task)):
            slices = [""] * len(names)
            written = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors)
            with tf.control_dependencies([written]):
                return tf.constant(0)

    return write


@lru_cache(maxsize=256)
def _reader(host: str, dtype: np.dtype[Any]) -> Any:
    @tf.function(autograph=False)
    def read(prefix: tf.Tensor, name: tf.Tensor) -> tf.Tensor:
        with tf.device(host):
            names = tf.reshape(name, [1])
            return tf.raw_ops.RestoreV2(
                prefix=prefix, tensor_names=names, shape_and_slices=[""], dtypes=[tf.as_dtype(dtype)]
            )[0]

    return read
