"""Whether collectives still run in this process: after one has failed, TensorFlow rejects all others."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import context

# Below the group keys of tfdist's strategies, above those of TensorFlow's. Keys are unique in the cluster.
_FIRST_GROUP_KEY = 1 << 15
_INSTANCE_KEY = 1
_ABORTED = re.compile(r"(Collective ops is aborted by: )+")
_PEER = re.compile(r"from remote target (\S+)")

_failed_step: str | None = None  # the error of a step on this worker
_failed_exchange: Callable[[], Exception | None] | None = None


def watch_exchange(failure: Callable[[], Exception | None]) -> None:
    """Makes the failure of the exchange with other workers, if there is one, an error of `check_collectives`.

    What has failed before used an earlier exchange.
    """
    global _failed_exchange, _failed_step
    _failed_exchange, _failed_step = failure, None


def record_failed_step(error: tf.errors.OpError) -> None:
    """Makes later calls of `check_collectives` raise an error: the other workers are in that step, or in another."""
    global _failed_step
    _failed_step = _failed_step or _first_line(error)


def can_join_again(failure: Exception | None) -> bool:
    """Whether the workers of a failed exchange are all still there, and connect again when they create strategies."""
    return bool(getattr(failure, "leaves_workers", False))


def check_collectives(*, joins: bool = False) -> None:
    """Raises an error if the collectives of this process cannot be used any more.

    TensorFlow aborts them for the life of the process when one fails: when a peer is lost, a timeout passes, or
    replicas disagree about a shape. An error of another operation only cancels the collectives of its step; with
    several workers the others still wait in them.

    Args:
        joins: Whether the caller connects with the other workers next, so that a failure of the exchange with them
            counts only if a worker is lost.

    Raises:
        RuntimeError: A collective has failed, or a step of this worker. The message has the first cause.
    """
    failure = None if _failed_exchange is None else _failed_exchange()
    if failure is None:
        cause = _failed_step
    else:
        cause = None if joins and can_join_again(failure) else str(failure)
    if cause is None and context()._initialized:
        cause = _cause_of_abort()
    if cause is not None:
        again = "Create new strategies on all workers, or start" if can_join_again(failure) and not joins else "Start"
        raise RuntimeError(
            "A collective, or a step on this worker, has failed earlier in this process, and its strategies cannot "
            f"reduce any more. Received: {cause!r}. Expected: a process in which none has failed. {again} a new "
            "process: restart the notebook's kernel, or let the script end with this error under "
            "`tfdist run --max-restarts`; with the callback FailureRecovery the training resumes."
        )


def sum_of_group(
    tensor: tf.Tensor, size: int, group_key: int, instance_key: int, *, hint: str, ordering_tokens: Sequence[Any] = ()
) -> tf.Tensor:
    """Sums a tensor over a group by a collective of TensorFlow."""
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=size,
        group_key=group_key,
        instance_key=instance_key,
        ordering_token=list(ordering_tokens),
        merge_op="Add",
        final_op="Id",
        communication_hint=hint.lower(),
    )


def _cause_of_abort() -> str | None:
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            sum_of_group(tf.zeros([]), 1, _group_key_of_process(), _INSTANCE_KEY, hint="ring")
    except tf.errors.OpError as error:
        return _first_line(error)
    return None


def _first_line(error: tf.errors.OpError) -> str:
    """Returns TensorFlow's first cause, without the places where it was noticed."""
    parts = _ABORTED.split(error.message, maxsplit=1)
    if len(parts) == 3:
        peer = _PEER.search(parts[2])
        return f"{parts[1]}{parts[2].strip().splitlines()[0]}" + (f" ({peer[1]})" if peer else "")
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "[[{{" not in line and "[Op:" not in line), type(error).__name__)


def _group_key_of_process() -> int:
    server = context()._collective_ops_server_def
    if server is None:
        return _FIRST_GROUP_KEY
    before = sum(len(job.tasks) for job in server.cluster.job if job.name < server.job_name)
    return _FIRST_GROUP_KEY + before + int(server.task_index)
