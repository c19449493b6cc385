"""The sharding of a strategy: what of the state of optimizers is split, over which replicas, and gathers of slots."""

import dataclasses
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReplicaReduction
from tfdist.collectives.key_values import key_values
from tfdist.sharded_state.layout import SpanLayout
from tfdist.tensorflow_internals.collective_launcher import ReplicaLauncher
from tfdist.tensorflow_internals.sent_dtypes import from_words, to_words

# Longer than a worker should be busy elsewhere, such as with the callbacks of an epoch.
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class ShardedState:
    """What `shard_optimizer_state` splits, for a mirrored strategy. `True` stands for `ShardedState()`.

    Attributes:
        accumulators: Whether the sums of gradients of `gradient_accumulation_steps` are split, too (stage 2 of ZeRO):
            a replica keeps those of its part. Gradients are then sent in every micro-step instead of once an update.
        weights_dtype: "bfloat16": updated weights are sent in this dtype, half of the bytes. All replicas compute with
            these weights, while each keeps its part of the exact ones, to which updates are applied. `None`: the dtype
            of the weights.
        weights: Whether the weights are split, too, and accumulators (stage 3 of ZeRO): a replica keeps its part of
            each weight of at least 16,384 values. Those of a layer are gathered before it computes, and again for its
            backward pass, so a step sends half as much again.

    >>> from tfdist.strategies import MirroredStrategy, ShardedState
    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"], shard_optimizer_state=ShardedState(accumulators=True))
    >>> strategy.num_replicas_in_sync
    2
    """

    accumulators: bool = False
    weights_dtype: str | None = None
    weights: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.weights, bool):
            raise ValueError(
                f"Invalid `weights` of a ShardedState. Received: {self.weights!r}. Expected: True or False."
            )
        if self.weights and self.weights_dtype is not None:
            raise ValueError(
                "Weights in parts are sent in the dtype in which layers compute. Received: "
                f"ShardedState(weights=True, weights_dtype={self.weights_dtype!r}). Expected: one of them. Leave "
                "`weights_dtype` out, and use `keras.mixed_precision` to send half of the bytes."
            )
        if not isinstance(self.accumulators, bool):
            raise ValueError(
                f"Invalid `accumulators` of a ShardedState. Received: {self.accumulators!r}. Expected: True or False."
            )
        if self.weights_dtype not in (None, "bfloat16"):
            raise ValueError(
                f"Invalid `weights_dtype` of a ShardedState. Received: {self.weights_dtype!r}. Expected: 'bfloat16' or "
                "None."
            )


def sharded_state_of(argument: Any, shard_weights: Any = False) -> ShardedState | None:
    """Returns what the arguments `shard_optimizer_state` and `shard_weights` of a strategy demand; `None`: nothing.

    Raises:
        ValueError: If one is invalid.
    """
    if not isinstance(shard_weights, bool):
        raise ValueError(
            f"Invalid `shard_weights`. Received: {shard_weights!r}. Expected: True or False. Pass one of them, and "
            "options as `shard_optimizer_state=ShardedState(weights=True)`."
        )
    if isinstance(argument, ShardedState):
        return dataclasses.replace(argument, weights=argument.weights or shard_weights)
    if shard_weights and isinstance(argument, bool):
        return ShardedState(weights=True)
    if not isinstance(argument, bool):
        raise ValueError(
            f"Invalid `shard_optimizer_state`. Received: {argument!r}. Expected: True, False or a "
            "`tfdist.strategies.ShardedState`. Pass one of them."
        )
    return ShardedState() if argument else None


class Meeting:
    """Waits until all workers are at the same point, for a limited time.

    A collective would wait indefinitely; TensorFlow does not survive a time limit of one that has begun.
    """

    def __init__(self, name: str, rank: int, workers: int) -> None:
        """Meets `workers` workers, of which this is `rank`, under a `name` that is unique in the cluster."""
        self._name, self._rank, self._workers = name, rank, workers
        self._met = 0

    def wait(self) -> str:
        """Waits for all workers; returns the key of this worker, to withdraw when all have read it.

        Raises:
            RuntimeError: If a worker does not come within `TIMEOUT_SECONDS`.
        """
        self._met += 1
        key = f"{self._name}/{self._met}"
        key_values.publish(f"{key}/{self._rank}", "here")
        ends = time.monotonic() + TIMEOUT_SECONDS
        for rank in range(self._workers):
            if rank != self._rank and not key_values.is_published(f"{key}/{rank}", ends - time.monotonic()):
                # The next read has this number again: a worker that comes late waits for it, not for one after it.
                self._met -= 1
                key_values.withdraw(f"{key}/{self._rank}")
                raise RuntimeError(
                    "A slot or weight in parts was not read by all workers. Received: no answer of worker "
                    f"{rank} within {TIMEOUT_SECONDS:g} s. Expected: all workers save the model, or read weights or "
                    "`optimizer.variables`, at the same step. Call `model.save` on every worker, each with its own "
                    "path."
                )
        return f"{key}/{self._rank}"


def replicas_by_position(launchers: Sequence[ReplicaLauncher], first: int) -> list[int]:
    """Returns the number of the replica at each position of the group, which TensorFlow chooses.

    All workers call this with the launchers of their replicas, over all replicas, the `first` of which has this number.
    """
    numbers = [tf.constant([first + index]) for index in range(len(launchers))]
    function = tf.function(lambda *local: _launched(launchers, local), autograph=False)
    specs = [tf.TensorSpec([1], tf.int32)] * len(launchers)
    return [int(number) for number in function.get_concrete_function(*specs)(*numbers).numpy()]


class PartGathers:
    """Gathers vectors of which each replica holds a part."""

    def __init__(self, launchers: Sequence[ReplicaLauncher], order: Sequence[int], meeting: Meeting) -> None:
        """Gathers over the group of `launchers`, of which `order` are the replicas by position, at a `meeting`."""
        self._launchers, self._order, self._meeting = list(launchers), list(order), meeting
        self._functions: dict[Any, Any] = {}

    def __call__(self, parts: Sequence[tf.Tensor], lengths: Sequence[int]) -> tf.Tensor:
        """Returns the parts of all replicas as one vector. All workers have to call this with equal `lengths`.

        `parts` are vectors of the local replicas, `lengths` those of all replicas, by their numbers. For an error if
        another worker does not take part see `Meeting.wait`.
        """
        if len(parts) == len(lengths):
            return tf.concat([_on_host(part) for part in parts], axis=0)
        dtype, longest = parts[0].dtype, max(lengths)
        padded = [tf.pad(part, [[0, longest - int(part.shape[0])]]) for part in parts]
        # As bits: devices of several workers gather by sums with zeros, which would make 0.0 of -0.0.
        words = self._gather_once([to_words(part[tf.newaxis])[0] for part in padded])
        rows = from_words(tf.reshape(words, [len(lengths), -1]), dtype, len(lengths), longest)
        return tf.concat([rows[self._order.index(replica)][:length] for replica, length in enumerate(lengths)], axis=0)

    def _gather_once(self, words: Sequence[tf.Tensor]) -> tf.Tensor:
        length = int(words[0].shape[0])
        if length not in self._functions:
            specs = [tf.TensorSpec([length], words[0].dtype)] * len(words)
            function = tf.function(lambda *local: _launched(self._launchers, local), specs, autograph=False)
            self._functions[length] = function
        key = self._meeting.wait()
        gathered = _on_host(self._functions[length](*words))
        key_values.withdraw(key)  # all workers have read it: they have since met in the collective
        return gathered


class StateSharding:
    """Splits the slots of the optimizers of one strategy over its replicas.

    Attributes:
        devices: The devices of the replicas of this process.
        first: The number of the first of them over all workers.
        replicas: The number of the replica at each position of the group of all replicas.
        gather: Gathers whole slots outside of steps.
        options: What is split.
    """

    def __init__(self, strategy: Any, bucket_bytes: int, name: str, options: ShardedState) -> None:
        """Splits over the replicas of `strategy`, a mirrored one, whose workers all call this.

        For `bucket_bytes` see `fill_buckets`; `name` is unique in the cluster.
        """
        self.options, self._bucket_bytes = options, bucket_bytes
        self._operations = operations = strategy.extended.replica_operations
        self.devices: Sequence[str] = [launcher.device for launcher in operations.launchers]
        self.first = sum(strategy.replicas_of_workers[: strategy.rank])
        self.replicas = replicas_by_position(operations.launchers, self.first)
        meeting = Meeting(name, strategy.rank, strategy.num_workers)
        self.gather = PartGathers(operations.launchers, self.replicas, meeting)

    def plan(self, specs: Sequence[tf.TensorSpec], *, is_whole: bool, in_parts: Collection[int] = ()) -> SpanLayout:
        """Returns the layout of variables of these shapes and dtypes.

        If `is_whole`, each variable has one owner. The weights at the positions `in_parts` are split themselves.
        """
        if is_whole:
            return SpanLayout.plan_whole(specs, len(self.replicas), self._bucket_bytes)
        return SpanLayout.plan(specs, len(self.replicas), self._bucket_bytes, in_parts)

    def reduction(self, local_replica: int) -> ReplicaReduction:
        return self._operations.reductions[local_replica]


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
