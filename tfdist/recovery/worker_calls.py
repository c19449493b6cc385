"""Calls of operations on the devices of workers, for checkpoints: with a time limit and named errors."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.checkpoint import CheckpointError
from tfdist.checkpoint.errors import explained
from tfdist.tensorflow_internals.tensorflow_symbols import resolved_device
from tfdist.utils import atomic_files

_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)
_PROBE_FILE = ".shared"
# Network file systems show the files of other hosts late, after some seconds at most.
_VISIBLE_WITHIN_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
# Lines of TensorFlow's messages that say where an operation was created.
_NOT_REASONS = ("Detected at", "File ", "[[", "Graph execution error", "<stack traces", ":UNKNOWN", "Additional GRPC")


def task_of(device: str) -> str:
    """Returns the task of a device.

    >>> task_of("/job:worker/replica:0/task:1/device:GPU:0")
    '/job:worker/replica:0/task:1'
    """
    return device.partition("/device:")[0]


def own_task() -> str:
    """Returns the task of this process."""
    return task_of(resolved_device("CPU:0"))


def host_of(device: str) -> str:
    """Returns the CPU of the task of a device, whose operations read and write files."""
    return f"{task_of(device)}/device:CPU:0"


def call_workers(calls: Mapping[str, Callable[[], Any]], action: str, timeout_seconds: float) -> dict[str, Any]:
    """Makes calls at the same time, each of which runs operations on one task.

    Args:
        calls: The call for each task.
        action: What they do, for messages: "write" or "read".
        timeout_seconds: How long to wait. A call that has not ended then, as of a frozen worker, is left alone.

    Returns:
        What the calls return, by task.

    Raises:
        CheckpointError: If a worker is lost, fails, or has not answered in time; the message names it.
    """
    results: queue.SimpleQueue[tuple[str, Any, BaseException | None]] = queue.SimpleQueue()

    def run(task: str, call: Callable[[], Any]) -> None:
        try:
            _settle(host_of(task))
            results.put((task, call(), None))
        except BaseException as error:
            results.put((task, None, error))

    for task, call in calls.items():
        # A daemon, so that the interpreter does not wait for a frozen worker.
        threading.Thread(target=run, args=(task, call), name=f"tfdist-{action}", daemon=True).start()
    end = time.monotonic() + timeout_seconds
    answers: dict[str, Any] = {}
    while len(answers) < len(calls):
        try:
            task, result, error = results.get(timeout=max(end - time.monotonic(), 0.001))
        except queue.Empty:
            silent = ", ".join(task for task in calls if task not in answers)
            raise CheckpointError(
                f"A worker did not {action} its part of a checkpoint within {timeout_seconds:g} s. Received: no answer "
                f"of {silent}. Expected: workers that run. End frozen ones; if their disk is slow, raise "
                "peer_timeout_seconds of FailureRecovery. Complete checkpoints are intact."
            ) from None
        if error is not None:
            raise _explained(task, error, action) from error
        answers[task] = result
    return answers


def _settle(host: str) -> None:
    """Waits until a task has done what it was asked to do eagerly, such as resets of metrics.

    Functions do not wait for it.

    A function asks first, because a question to a frozen task that is not within a function holds Python's lock.
    """
    _answer(host)()
    with tf.device(host):
        tf.raw_ops.AddV2(x=tf.constant(1), y=tf.constant(1)).numpy()


@lru_cache(maxsize=256)
def _answer(host: str) -> Any:
    @tf.function(autograph=False)
    def answer() -> tf.Tensor:
        with tf.device(host):
            return tf.raw_ops.AddV2(x=tf.constant(1), y=tf.constant(1))

    return answer.get_concrete_function()


def call_once(function: Any) -> Callable[[], Any]:
    """Returns a call of a `tf.function` that is traced for it, as those for other workers are.

    TensorFlow would count calls of several functions with the same Python code as retracing, and warn.
    """
    return lambda: function.get_concrete_function()()


def check_shared_directory(directory: Path, tasks: Mapping[str, str], timeout_seconds: float) -> None:
    """Checks that the tasks see a file that this process writes into the directory of checkpoints.

    Args:
        directory: The directory.
        tasks: A device of each task, by task.
        timeout_seconds: How long to wait for an answer.

    Raises:
        CheckpointError: If a worker does not see the file, or does not answer, or this process cannot write it.
    """
    path = (directory / _PROBE_FILE).absolute()
    content = str(time.time_ns()).encode()
    calls = {task: _reads_content(str(path), device, content) for task, device in tasks.items()}
    with explained("No checkpoint can be written", directory):
        directory.mkdir(parents=True, exist_ok=True)
        atomic_files.write(path, content)
    try:
        reasons = call_workers(calls, "read", timeout_seconds)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    for task in calls:  # in their order, not that of the answers
        if reasons[task]:
            raise CheckpointError(
                f"A worker does not see the directory of the checkpoints. Received: {reasons[task]}, from {task}. "
                f"Expected: the file that this process wrote to {str(path)!r}. Pass FailureRecovery a directory on a "
                "file system that is mounted at the same path on the hosts of all workers and of this process."
            )


def _reads_content(path: str, device: str, content: bytes) -> Callable[[], str]:
    """Returns a call that reads a file until it has `content`; its result is empty, or why the file is not read."""

    @tf.function(autograph=False)
    def read(name: tf.Tensor) -> tf.Tensor:
        with tf.device(host_of(device)):
            return tf.io.read_file(name)

    def call() -> str:
        traced = read.get_concrete_function(tf.TensorSpec([], tf.string))
        end = time.monotonic() + _VISIBLE_WITHIN_SECONDS
        while True:
            try:
                if traced(tf.constant(path)).numpy() == content:
                    return ""
                reason = "another content"
            except (
                tf.errors.NotFoundError,
                tf.errors.FailedPreconditionError,
                tf.errors.PermissionDeniedError,
            ) as error:
                reason = reason_of(error)
            if time.monotonic() >= end:
                return reason
            time.sleep(_PAUSE_SECONDS)

    return call


def _explained(task: str, error: BaseException, action: str) -> BaseException:
    if not isinstance(error, tf.errors.OpError):
        return error
    received = f"{type(error).__name__} of {task}: {reason_of(error)}"
    if isinstance(error, _LOST):
        return CheckpointError(
            f"A worker was lost while it had to {action} its part of a checkpoint. Received: {received}. Expected: "
            "workers that run until the end. Start the program again, it resumes from the newest complete checkpoint."
        )
    return CheckpointError(
        f"A worker could not {action} its part of a checkpoint. Received: {received}. Expected: an intact directory "
        "on a file system that all workers share, in which they may write, with space for all parts. If a file is "
        "damaged, remove its checkpoint: training resumes from an older one. Complete checkpoints are intact."
    )


def reason_of(error: tf.errors.OpError) -> str:
    """Returns the line of a message of TensorFlow that says what has happened."""
    lines = [line.strip() for line in str(error.message).splitlines()]
    reasons = [line for line in lines if line and not line.startswith(_NOT_REASONS) and "root error" not in line]
    return (reasons or lines or [""])[0].rstrip(".")
