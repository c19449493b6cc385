"""Variables on the devices of workers: copied, written into a checkpoint and read there, without being sent here.

Files are TensorFlow's bundles, which contain checksums of the tensors: `worker-1.index` and
`worker-1.data-00000-of-00001` for the task 1 of the job "worker". Any task reads any of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.checkpoint import Checkpoint
from tfdist.recovery.host_copies import HostCopies
from tfdist.recovery.worker_calls import call_workers, explained_error, host_of, own_task, task_of

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
        array = self.read(f"{own_task()}/device:CPU:0").numpy()
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
        timeout_seconds: How long to wait for workers that write.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._host_copies = HostCopies()
        self._timeout_seconds = timeout_seconds
        self._functions: dict[Any, Any] = {}
        self._tensors: dict[str, dict[str, tf.Tensor]] = {}
        self._bytes: dict[str, int] = {}

    def request(self, name: str, variable: Any) -> np.ndarray | None:
        """Requests a copy, as `HostCopies.request`. Returns None if the copy is on a worker."""
        own = own_task()
        remote = [one for one in (variable, *getattr(variable, "copies", ())) if task_of(one.device) != own]
        if not remote:
            return self._host_copies.request(name, variable)
        chosen = min(remote, key=lambda one: self._bytes.get(task_of(one.device), 0))
        task = task_of(chosen.device)
        try:
            with tf.device(chosen.device):  # copies nothing: an update of what was read takes new memory
                value = tf.raw_ops.ReadVariableOp(resource=chosen.handle, dtype=chosen.dtype)
        except tf.errors.OpError as error:
            raise explained_error(task, error, "write") from error
        self._tensors.setdefault(task, {})[name] = value
        self._bytes[task] = self._bytes.get(task, 0) + _bytes_of(value)
        return None

    def finish(self) -> None:
        """Makes the copies in host memory, as `HostCopies.finish`."""
        self._host_copies.finish()

    def take_worker_files(self) -> "WorkerBundles | None":
        """Returns what workers have to write for the copies since the last call; None if that is nothing."""
        tensors, self._tensors, self._bytes = self._tensors, {}, {}
        return WorkerBundles(tensors, self._functions, self._timeout_seconds) if tensors else None


class WorkerBundles:
    """The copies of one snapshot on workers, which write them into the files of a checkpoint.

    Attributes:
        description: By the prefix of files, the names of their tensors with dtype and shape, as JSON.
        size_bytes: The size of all tensors.
    """

    def __init__(
        self, tensors: dict[str, dict[str, tf.Tensor]], functions: dict[Any, Any], timeout_seconds: float
    ) -> None:
        self._tensors, self._functions, self._timeout_seconds = tensors, functions, timeout_seconds
        self.size_bytes = sum(_bytes_of(one) for of_task in tensors.values() for one in of_task.values())
        self.description: Json = {
            _prefix_of(task): {name: [one.dtype.name, list(one.shape)] for name, one in of_task.items()}
            for task, of_task in tensors.items()
        }

    def write(self, directory: Path) -> Mapping[str, int | None]:
        """Makes the workers write, at the same time, and releases the copies; see `WorkerFiles`.

        Raises:
            CheckpointError: If a worker is lost, cannot write or is not ready in time.
        """
        tensors, self._tensors = self._tensors, {}
        sizes: dict[str, int | None] = {}
        for task, of_task in tensors.items():
            prefix = _prefix_of(task)
            sizes[f"{prefix}.data-00000-of-00001"] = sum(map(_bytes_of, of_task.values()))
            sizes[f"{prefix}.index"] = None
        calls = {task: self._call(task, directory / _prefix_of(task), of_task) for task, of_task in tensors.items()}
        tensors.clear()
        call_workers(calls, "write", self._timeout_seconds)
        return sizes

    def _call(self, task: str, prefix: Path, tensors: dict[str, tf.Tensor]) -> Any:
        key = task, tuple((name, one.dtype, tuple(one.shape)) for name, one in tensors.items())
        if key not in self._functions:
            self._functions[key] = _writer(task, list(tensors))
        write, values = self._functions[key], list(tensors.values())
        return lambda: write(tf.constant(str(prefix)), values).numpy()


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


def _bytes_of(tensor: tf.Tensor) -> int:
    return int(tensor.shape.num_elements() or 0) * int(tensor.dtype.size)


# Operations within functions: an error of an operation that runs eagerly on another task is raised by a later one.


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
