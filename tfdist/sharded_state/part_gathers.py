"""Gathers parts of a vector that the replicas of all workers hold, outside of steps."""

import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.key_values import key_values
from tfdist.tensorflow_internals.collective_launcher import ReplicaLauncher
from tfdist.tensorflow_internals.sent_dtypes import from_words, to_words

# Longer than a worker should be busy elsewhere, such as with the callbacks of an epoch.
TIMEOUT_SECONDS = 300.0


class Meeting:
    """Waits until all workers are at the same point, for a limited time.

    A collective would wait indefinitely; TensorFlow does not survive a time limit of one that has begun.
    """

    def __init__(self, name: str, rank: int, workers: int) -> None:
        """Meets `workers` workers, of which this is `rank`, under a `name` that is unique in the cluster."""
        self._name, self._rank, self._workers = name, rank, workers
        self._met = 0

    def wait(self) -> str:
        """Waits for all workers; returns the key of this worker, which `leave` takes.

        Raises:
            RuntimeError: If a worker does not come within `TIMEOUT_SECONDS`.
        """
        self._met += 1
        key = f"{self._name}/{self._met}"
        key_values.publish(f"{key}/{self._rank}", "here")
        other_ranks = [rank for rank in range(self._workers) if rank != self._rank]
        ends = time.monotonic() + TIMEOUT_SECONDS
        for rank in other_ranks:
            if not key_values.is_published(f"{key}/{rank}", ends - time.monotonic()):
                # The next read has this number again: a worker that comes late waits for it, not for one after it.
                self._met -= 1
                key_values.withdraw(f"{key}/{self._rank}")
                raise RuntimeError(
                    "A slot of an optimizer whose state is sharded was not read by all workers. Received: no answer of "
                    f"worker {rank} within {TIMEOUT_SECONDS:g} s. Expected: all workers save the model, or read "
                    "`optimizer.variables`, at the same step. Call `model.save` on every worker, each with its own "
                    "path."
                )
        return f"{key}/{self._rank}"

    def leave(self, key: str) -> None:
        """Removes a key that all workers have read, as they have since met in a collective."""
        key_values.withdraw(key)


def replicas_by_position(launchers: Sequence[ReplicaLauncher], first: int) -> list[int]:
    """Returns the number of the replica at each position of the group, which TensorFlow chooses.

    Args:
        launchers: The launchers of the local replicas, over all replicas. All workers have to call this.
        first: The number of the first local replica.
    """
    gathered = _gather(launchers, [tf.constant([first + index]) for index in range(len(launchers))])
    return [int(number) for number in gathered.numpy()]


class PartGathers:
    """Gathers vectors of which each replica holds a part."""

    def __init__(self, launchers: Sequence[ReplicaLauncher], order: Sequence[int], meeting: Meeting) -> None:
        """Gathers over the group of `launchers`, of which `order` are the replicas by position, at a `meeting`."""
        self._launchers, self._order, self._meeting = list(launchers), list(order), meeting
        self._functions: dict[Any, Any] = {}

    def __call__(self, parts: Sequence[tf.Tensor], lengths: Sequence[int]) -> tf.Tensor:
        """Returns the parts of all replicas as one vector. All workers have to call this with equal `lengths`.

        Args:
            parts: The parts of the local replicas, vectors.
            lengths: The lengths of the parts of all replicas, by their numbers.

        Raises:
            RuntimeError: If another worker does not take part; see `Meeting.wait`.
        """
        if len(parts) == len(lengths):
            return tf.concat([_on_host(part) for part in parts], axis=0)
        dtype, longest = parts[0].dtype, max(lengths)
        padded = [tf.pad(part, [[0, longest - int(part.shape[0])]]) for part in parts]
        words = self._gather_once([to_words(part[tf.newaxis])[0] for part in padded])
        rows = from_words(tf.reshape(words, [len(lengths), -1]), dtype, len(lengths), longest)
        return tf.concat([rows[self._order.index(replica)][:length] for replica, length in enumerate(lengths)], axis=0)

    def _gather_once(self, words: Sequence[tf.Tensor]) -> tf.Tensor:
        """Gathers by one function for each length."""
        length = int(words[0].shape[0])
        if length not in self._functions:
            specs = [tf.TensorSpec([length], words[0].dtype)] * len(words)

            def gather(*local: tf.Tensor) -> tf.Tensor:
                return _launched(self._launchers, local)

            self._functions[length] = tf.function(gather, input_signature=specs, autograph=False)
        key = self._meeting.wait()
        gathered = _on_host(self._functions[length](*words))
        self._meeting.leave(key)
        return gathered


def _gather(launchers: Sequence[ReplicaLauncher], tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    function = tf.function(lambda *local: _launched(launchers, local), autograph=False)
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
    return function.get_concrete_function(*specs)(*tensors)


def _launched(launchers: Sequence[ReplicaLauncher], tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    gathered = []
    for launcher, tensor in zip(launchers, tensors, strict=True):
        with tf.device(launcher.device):
            gathered.append(launcher.gather(tf.identity(tensor), None, shape_is_fixed=True))
    with tf.control_dependencies(gathered):
        return tf.identity(gathered[0])


def _on_host(tensor: tf.Tensor) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.identity(tensor)
