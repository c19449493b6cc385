"""What there is to tell of a training: each source gives its scalars since it was last asked, or none."""

import time
from dataclasses import asdict
from typing import Any, Protocol

import tensorflow as tf

from tfdist.collectives import Durations, TrafficCount

# What stands beside the charts. Quantities of one replica are those of the chief's first one.
DESCRIPTIONS = {
    "wire_bytes": "Bytes of gradients that a replica sent for an update of the optimizer.",
    "dense_bytes": "Bytes of gradients that it would have sent without compression.",
    "compression_ratio": "`dense_bytes` divided by `wire_bytes`.",
    "encode_ms": "Milliseconds of an update in which buckets were encoded, added up over buckets.",
    "exchange_ms": "Milliseconds of an update within collectives, waiting for slower workers included.",
    "decode_ms": "Milliseconds of an update in which results were decoded.",
    "residual_norm": "Global L2 norm of what error feedback has not yet sent, on one replica.",
    "step_ms": "Milliseconds of a training step: its data and its update, without callbacks and validation.",
    "checkpoint_stall_ms": "Milliseconds for which a save held the training up.",
    "restarts": "How often the training was started again.",
    "world_size": "Number of workers.",
    "replicas": "Number of replicas that share a batch.",
    "samples_per_second": "Samples of this worker, by the time of the training steps.",
    "staleness": "Updates by others between this worker's pull and its push, on average.",
    "bytes_pushed": "Bytes of gradients that this worker sent to the servers, per step.",
    "bytes_pulled": "Bytes of variables that it got from them, per step.",
}

Scalars = dict[str, float]


class Source(Protocol):
    """Something that there is to tell of."""

    def scalars(self) -> Scalars:
        """What has come since the last call, by name."""


class StepTimes:
    """How long training steps take, by the clock of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of all steps since `scalars` was last called, the first one too
        self._counted_seconds, self._counted_steps = 0.0, 0
        self._has_traced = False
        self._began = 0.0

    def begin(self) -> None:
        """To be called when an execution of steps begins."""
        self._began = time.perf_counter()

    def end(self, steps: int) -> None:
        """To be called when it has ended. The first one traces the step, and is none like the others."""
        passed = time.perf_counter() - self._began
        self.seconds += passed
        if self._has_traced:
            self._counted_seconds, self._counted_steps = self._counted_seconds + passed, self._counted_steps + steps
        self._has_traced = True

    def scalars(self) -> Scalars:
        seconds, steps = self._counted_seconds, self._counted_steps
        self.seconds, self._counted_seconds, self._counted_steps = 0.0, 0.0, 0
        return {"step_ms": 1e3 * seconds / steps} if steps else {}


class Communication:
    """What this worker's first replica sends: nothing where a strategy does not count it, or there is one replica."""

    def __init__(self, strategy: Any) -> None:
        is_counted = hasattr(strategy, "communication") and strategy.num_replicas_in_sync > 1
        self._strategy = strategy if is_counted else None
        self._count, self._spent = self._now()

    def scalars(self) -> Scalars:
        (count, spent), before, spent_before = self._now(), self._count, self._spent
        self._count, self._spent = count, spent
        sent, took = count - before, spent - spent_before
        if not sent.updates:
            return {}
        scalars = {
            "wire_bytes": sent.wire_bytes / sent.updates,
            "dense_bytes": sent.dense_bytes / sent.updates,
            "compression_ratio": float(sent.compression_ratio),
        }
        if took != Durations():
            by_name = {name.removesuffix("_seconds"): seconds for name, seconds in asdict(took).items()}
            scalars |= {f"{name}_ms": 1e3 * seconds / sent.updates for name, seconds in by_name.items()}
        return scalars

    def _now(self) -> tuple[TrafficCount, Durations]:
        if self._strategy is None:
            return TrafficCount(), Durations()
        return self._strategy.communication, sum(self._strategy.durations_by_method.values(), Durations())


class ResidualNorm:
    """What error feedback keeps back on this worker's first replica; nothing without error feedback."""

    def __init__(self, strategy: Any) -> None:
        self._state = getattr(strategy, "compression_state", None)

    def scalars(self) -> Scalars:
        replicas = {} if self._state is None else self._state.replicas
        first = min(replicas, key=lambda name: int(name.removeprefix("replica_")), default=None)
        entries = () if first is None else replicas[first].entries.values()
        residuals = [of_variable["residual"] for of_variable in entries if "residual" in of_variable]
        return {"residual_norm": float(tf.linalg.global_norm(residuals))} if residuals else {}


class SaveStalls:
    """For how long each save of a `FailureRecovery` holds the training up; nothing where none was made."""

    def __init__(self, recovery: Any) -> None:
        self._recovery = recovery
        self._count, self._seconds = self._now()

    def scalars(self) -> Scalars:
        (count, seconds), count_before, before = self._now(), self._count, self._seconds
        self._count, self._seconds = count, seconds
        saves = count - count_before
        return {"checkpoint_stall_ms": 1e3 * (seconds - before) / saves} if saves else {}

    def _now(self) -> tuple[int, float]:
        return (0, 0.0) if self._recovery is None else (self._recovery.saves, self._recovery.stall_seconds)


class World:
    """How many there are."""

    def __init__(self, strategy: Any) -> None:
        # Workers of parameter servers are no replicas, and only our strategies know how many there are.
        workers = getattr(strategy, "num_workers", getattr(strategy, "workers", None))
        self._scalars: Scalars = {} if workers is None else {"world_size": float(workers)}
        if strategy.num_replicas_in_sync > 1:
            self._scalars["replicas"] = float(strategy.num_replicas_in_sync)

    def scalars(self) -> Scalars:
        return dict(self._scalars)


class PushingWorkers:
    """What each worker of parameter servers does; no workers under other strategies."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy if hasattr(strategy, "worker_counts") else None
        self._counts = self._now()

    def scalars(self, seconds: float) -> list[Scalars]:
        """For each worker, in `seconds` of training steps."""
        before, self._counts = self._counts, self._now()
        done = [count.since(earlier) for count, earlier in zip(self._counts, before, strict=True)]
        return [_of_worker(count, seconds) if count.steps else {} for count in done]

    def _now(self) -> list[Any]:
        return [] if self._strategy is None else list(self._strategy.worker_counts)


def _of_worker(count: Any, seconds: float) -> Scalars:
    scalars = {
        "staleness": float(count.staleness),
        "bytes_pushed": count.bytes_pushed / count.steps,
        "bytes_pulled": count.bytes_pulled / count.steps,
    }
    return scalars | ({"samples_per_second": count.samples / seconds} if seconds > 0 else {})
