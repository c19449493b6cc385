"""Sources of the scalars that TrainingMonitor writes: communication, residuals, step times, saves, workers."""

import time
from dataclasses import asdict
from typing import Any, Protocol

import tensorflow as tf

from tfdist.collectives import CommunicationStats, ExchangeDurations
from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy

# The texts beside the charts. What is measured on one replica is measured on the chief's first one.
DESCRIPTIONS = {
    "wire_bytes": "Bytes of gradients that a replica sent per update of the optimizer.",
    "dense_bytes": "Bytes of gradients that the replica would have sent without compression.",
    "compression_ratio": "`dense_bytes` divided by `wire_bytes`.",
    "encode_ms": "Milliseconds per update spent on encoding, summed over buckets.",
    "exchange_ms": "Milliseconds per update spent in collectives, including waiting for slower workers.",
    "decode_ms": "Milliseconds per update spent on decoding.",
    "residual_norm": "Global L2 norm of the residuals of error feedback on one replica.",
    "step_ms": "Milliseconds per training step: its data and its update, without callbacks and validation.",
    "checkpoint_stall_ms": "Milliseconds for which a save stalled the training.",
    "restarts": "Number of restarts of the training.",
    "world_size": "Number of workers.",
    "replicas": "Number of replicas that share a batch.",
    "samples_per_second": "Samples of this worker per second of training steps.",
    "staleness": "Mean number of updates by other workers between this worker's pull and its push.",
    "bytes_pushed": "Bytes of gradients that this worker pushed per step.",
    "bytes_pulled": "Bytes of variables that this worker pulled per step.",
}

Scalars = dict[str, float]


class ScalarSource(Protocol):
    """Measures a part of a training."""

    def scalars(self) -> Scalars:
        """Returns the values since the last call, by name; empty if there are none."""


class StepTimes:
    """Measures training steps by the clock of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of all steps since the last call of `scalars`, including the first one
        self._counted_seconds, self._counted_steps = 0.0, 0
        self._has_traced = False
        self._began = 0.0

    def begin(self) -> None:
        """Starts the clock. Call this before an execution of steps."""
        self._began = time.perf_counter()

    def end(self, steps: int) -> None:
        """Stops the clock. Call this after an execution of steps; the first one, which traces, does not count."""
        passed = time.perf_counter() - self._began
        self.seconds += passed
        if self._has_traced:
            self._counted_seconds, self._counted_steps = self._counted_seconds + passed, self._counted_steps + steps
        self._has_traced = True

    def scalars(self) -> Scalars:
        seconds, steps = self._counted_seconds, self._counted_steps
        self.seconds, self._counted_seconds, self._counted_steps = 0.0, 0.0, 0
        return {"step_ms": 1e3 * seconds / steps} if steps else {}


class CommunicationScalars:
    """Measures what this worker's first replica sends. Empty for one replica, and for strategies that do not count."""

    def __init__(self, strategy: Any) -> None:
        self._reduction = training_strategy(strategy).gradient_reduction if strategy.num_replicas_in_sync > 1 else None
        self._stats, self._durations = self._read()

    def scalars(self) -> Scalars:
        stats_before, durations_before = self._stats, self._durations
        self._stats, self._durations = self._read()
        sent, durations = self._stats - stats_before, self._durations - durations_before
        if not sent.updates:
            return {}
        scalars = {
            "wire_bytes": sent.wire_bytes / sent.updates,
            "dense_bytes": sent.dense_bytes / sent.updates,
            "compression_ratio": float(sent.compression_ratio),
        }
        if durations != ExchangeDurations():
            seconds_by_phase = {name.removesuffix("_seconds"): value for name, value in asdict(durations).items()}
            scalars |= {f"{phase}_ms": 1e3 * value / sent.updates for phase, value in seconds_by_phase.items()}
        return scalars

    def _read(self) -> tuple[CommunicationStats, ExchangeDurations]:
        if self._reduction is None:
            return CommunicationStats(), ExchangeDurations()
        durations = sum(self._reduction.durations_by_method().values(), ExchangeDurations())
        return self._reduction.communication(), durations


class ResidualNorm:
    """Measures the residuals of this worker's first replica. Empty without error feedback."""

    def __init__(self, strategy: Any) -> None:
        self._state = training_strategy(strategy).compression_state

    def scalars(self) -> Scalars:
        replicas = {} if self._state is None else self._state.replicas
        first = min(replicas, key=lambda name: int(name.removeprefix("replica_")), default=None)
        entries = () if first is None else replicas[first].entries.values()
        residuals = [entry["residual"] for entry in entries if "residual" in entry]
        return {"residual_norm": float(tf.linalg.global_norm(residuals))} if residuals else {}


class SaveStalls:
    """Measures how long each save of a `FailureRecovery` stalls the training. Empty if nothing was saved."""

    def __init__(self, recovery: Any) -> None:
        self._recovery = recovery
        self._saves, self._seconds = self._read()

    def scalars(self) -> Scalars:
        saves_before, seconds_before = self._saves, self._seconds
        self._saves, self._seconds = self._read()
        saves = self._saves - saves_before
        return {"checkpoint_stall_ms": 1e3 * (self._seconds - seconds_before) / saves} if saves else {}

    def _read(self) -> tuple[int, float]:
        return (0, 0.0) if self._recovery is None else (self._recovery.saves, self._recovery.stall_seconds)


class ClusterSize:
    """The numbers of workers and replicas."""

    def __init__(self, strategy: Any) -> None:
        self._scalars: Scalars = {}
        if is_tfdist_strategy(strategy):
            self._scalars["world_size"] = float(training_strategy(strategy).num_workers)
        if strategy.num_replicas_in_sync > 1:
            self._scalars["replicas"] = float(strategy.num_replicas_in_sync)

    def scalars(self) -> Scalars:
        return dict(self._scalars)


class ParameterServerWorkers:
    """Measures each worker of a parameter server strategy. Has no workers under other strategies."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = training_strategy(strategy)
        self._stats = list(self._strategy.worker_stats)

    def scalars(self, seconds: float) -> list[Scalars]:
        """Returns the values since the last call, by worker.

        Args:
            seconds: Duration of the training steps since then.
        """
        before, self._stats = self._stats, list(self._strategy.worker_stats)
        done = [stats.since(earlier) for stats, earlier in zip(self._stats, before, strict=True)]
        return [_of_worker(stats, seconds) if stats.steps else {} for stats in done]


def _of_worker(stats: Any, seconds: float) -> Scalars:
    scalars = {
        "staleness": float(stats.staleness),
        "bytes_pushed": stats.bytes_pushed / stats.steps,
        "bytes_pulled": stats.bytes_pulled / stats.steps,
    }
    return scalars | ({"samples_per_second": stats.samples / seconds} if seconds > 0 else {})
