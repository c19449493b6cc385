"""Measures the exchange of a step's gradients by a method: the time of a core, the collectives, the error."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import CompressionState
from tfdist.collectives.all_reduce import ReductionContext, ReplicaHierarchy
from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES
from tfdist.collectives.byte_counters import ByteCounters
from tfdist.collectives.recorded_reduction import RecordedReduction, Recorder
from tfdist.compression import Policy
from tfdist.planning.measurements import DENSE, Collective, ExchangeMeasurement
from tfdist.probe.probe_strategy import ProbeStrategy
from tfdist.probe.process_usage import timed
from tfdist.probe.worker_steps import UpdateGradients
from tfdist.tensorflow_internals.collective_launcher import loopback_launcher
from tfdist.tensorflow_internals.shared_operations import shared_operations

_MAX_COMPARED_VALUES = 1 << 26
_LEAST_PART = 0.01  # of backpropagation, after which a bucket is complete


class LoopbackExchange:
    """The exchange of the gradients of a step between equal members, one of which computes."""

    def __init__(self, strategy: ProbeStrategy, method: str, members: int, *, adds_up: bool = False) -> None:
        """Prepares an exchange by `method`; see `LoopbackLauncher` for `adds_up`."""
        launcher = loopback_launcher(strategy.extended, members)
        launcher.adds_up = adds_up
        policy = Policy(None if method == DENSE else method)
        self.counters = ByteCounters(launcher.host)
        self.state = CompressionState(policy)
        self.recorder = Recorder()
        self._context = ReductionContext()
        hierarchy = ReplicaHierarchy(launcher, launcher, None, 0)
        self._reduction = RecordedReduction(
            hierarchy, self._context, DEFAULT_BUCKET_BYTES, policy, self.state, self.counters
        )

    def __call__(self, updates: Sequence[UpdateGradients]) -> list[Any]:
        """Returns the sums of all gradients."""
        self.recorder = self._reduction.recorder = Recorder()
        sums: list[Any] = []
        for update in updates:
            with self._context.of_gradients(None, update.paths), shared_operations():
                sums += self._reduction(list(update.gradients), mean=False, options=None)
        return sums

    @property
    def state_bytes(self) -> int:
        """The size of the state of the compressors."""
        return sum(
            entry.shape.num_elements() * entry.dtype.size
            for replica in self.state.replicas.values()
            for entries in replica.entries.values()
            for entry in entries.values()
        )


def measure_exchange(
    strategy: ProbeStrategy, updates: Sequence[UpdateGradients], method: str, members: int, error: float | None = None
) -> ExchangeMeasurement:
    """Measures the exchange of `updates`. The error of the method is measured unless it is known."""
    exchange = LoopbackExchange(strategy, method, members)
    function = tf.function(lambda: _run(exchange, updates), autograph=False)
    sizes = [int(nbytes) for nbytes in function()[1]]
    seconds = timed(lambda: function()[1])
    kinds = [(call.kind, call.bucket) for call in exchange.recorder.calls]
    calls = tuple(Collective(kind, size, bucket) for (kind, bucket), size in zip(kinds, sizes, strict=True))
    if error is None:
        error = 0.0 if method == DENSE else gradient_error(strategy, updates, method)
    return ExchangeMeasurement(method, members, seconds, calls, exchange.state_bytes, error)


def gradient_error(strategy: ProbeStrategy, updates: Sequence[UpdateGradients], method: str) -> float:
    """Returns how far the sums of two equal members are from twice their gradients, relative to these.

    The second encoding of larger groups, of sums that were encoded before, adds nothing if members are equal.
    """
    sums = LoopbackExchange(strategy, method, 2, adds_up=True)(updates)
    gradients = itertools.chain.from_iterable(update.gradients for update in updates)
    difference = norm = 0.0
    for summed, gradient in zip(sums, gradients, strict=True):
        if (gradient.shape.num_elements() or 0) > _MAX_COMPARED_VALUES:
            continue
        exact = tf.convert_to_tensor(gradient)
        decoded = tf.convert_to_tensor(summed) / 2
        difference += float(tf.reduce_sum(tf.square(tf.cast(decoded - exact, tf.float32))))
        norm += float(tf.reduce_sum(tf.square(tf.cast(exact, tf.float32))))
    return (difference / norm) ** 0.5 if norm else 0.0


def _run(exchange: LoopbackExchange, updates: Sequence[UpdateGradients]) -> tuple[list[Any], list[tf.Tensor]]:
    sums = exchange(updates)
    return sums, [tf.convert_to_tensor(call.nbytes, tf.int64) for call in exchange.recorder.calls]


def bucket_ready(steps: Sequence[tuple[float, Sequence[float]]], forward_seconds: float) -> tuple[float, ...]:
    """Returns the part, in (0, 1], of backpropagation after which each bucket is complete.

    `steps` have when each began, and when each of its buckets was complete.
    """
    parts: list[list[float]] = []
    for began, times in steps:
        start = began + forward_seconds
        length = max(times) - start
        if length > 0:
            parts.append([(time - start) / length for time in times])
    if not parts:
        return tuple(1.0 for _ in (steps[0][1] if steps else ()))
    return tuple(min(max(statistics.median(values), _LEAST_PART), 1.0) for values in zip(*parts, strict=True))
