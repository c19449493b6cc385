"""TrainingMonitor: writes training metrics to TensorBoard; curves continue across restarts. Its scalars' sources."""

import contextlib
import functools
import itertools
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import tensorflow as tf

from tfdist.callbacks.communication_report import ExchangeTimingCallback
from tfdist.callbacks.failure_recovery import FailureRecovery
from tfdist.callbacks.strategy_support import check_strategies_early
from tfdist.collectives import CommunicationStats, ExchangeDurations
from tfdist.keras_internals.epoch_iterator import last_step
from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy
from tfdist.utils.argument_checks import check_whole_number

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


class StepTimes:
    """Measures training steps by the clock of this process.

    Like that of the classes below, `scalars` returns the values since its last call, by name; empty if there are none.
    """

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
        return self._reduction.counters.count(), durations


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


def residual_norm(strategy: Any) -> Scalars:
    """Returns the norm of the residuals of this worker's first replica; empty without error feedback."""
    state = training_strategy(strategy).compression_state
    replicas = {} if state is None else state.replicas
    first = min(replicas, key=lambda name: int(name.removeprefix("replica_")), default=None)
    entries = () if first is None else replicas[first].entries.values()
    residuals = [entry["residual"] for entry in entries if "residual" in entry]
    return {"residual_norm": float(tf.linalg.global_norm(residuals))} if residuals else {}


def cluster_size(strategy: Any) -> Scalars:
    """Returns the numbers of workers and replicas."""
    scalars: Scalars = {}
    if is_tfdist_strategy(strategy):
        scalars["world_size"] = float(training_strategy(strategy).num_workers)
    if strategy.num_replicas_in_sync > 1:
        scalars["replicas"] = float(strategy.num_replicas_in_sync)
    return scalars


class ParameterServerWorkers:
    """Measures each worker of a parameter server strategy. Has no workers under other strategies."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = training_strategy(strategy)
        self._stats = list(self._strategy.worker_stats)

    def scalars(self, seconds: float) -> list[Scalars]:
        """Returns the values since the last call, by worker; training steps have taken `seconds` since then."""
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


class RestartCount:
    """Counts the restarts of a training.

    Every restart by `tfdist run` counts. A start by hand counts if it resumes from a checkpoint: otherwise it is a new
    training.

    >>> count = RestartCount()
    >>> count.resume({"restarts": 2, "run": "an earlier run", "attempt": 1})
    >>> count.number - current_attempt()
    3
    """

    def __init__(self) -> None:
        self._before = 0  # restarts before this `tfdist run`, or before this process

    @property
    def number(self) -> int:
        """The number of restarts so far."""
        return self._before + current_attempt()

    def state(self) -> dict[str, Any]:
        """Returns the argument of `resume`, as JSON."""
        return {"restarts": self.number, "run": run_id(), "attempt": current_attempt()}

    def resume(self, state: dict[str, Any]) -> None:
        """Continues from the state in a checkpoint."""
        is_same_run = state["run"] == run_id()
        self._before = state["restarts"] - state["attempt"] if is_same_run else state["restarts"] + 1


def current_attempt() -> int:
    """Returns the attempt of `tfdist run` to which this process belongs, from 0; 0 under other launchers."""
    return int(os.environ.get("TFDIST_ATTEMPT", "0"))


@functools.cache
def run_id() -> str:
    """Returns an id that all attempts of one `tfdist run` share; under other launchers, an id of this process."""
    return os.environ.get("TFDIST_RUN_ID") or secrets.token_hex(8)


_PREFIX = "tfdist/"
_DESCRIPTIONS = {_PREFIX + name: text for name, text in DESCRIPTIONS.items()}
_numbers = itertools.count()


class TrainingMonitor(ExchangeTimingCallback):
    """Writes tfdist's measurements of a training to TensorBoard, over the training steps.

    It complements `keras.callbacks.TensorBoard`, which writes losses and metrics, and takes the same `log_dir`. It
    writes to the runs `tfdist` and, under parameter servers, `tfdist/worker-0` and so on. Only the chief writes. A
    scalar that does not apply is left out:

    - `tfdist/wire_bytes` and `tfdist/dense_bytes`: bytes of gradients that the chief's first replica sent per update,
      and would have sent uncompressed; `tfdist/compression_ratio`: the second divided by the first;
    - `tfdist/residual_norm`: global L2 norm of the residuals of error feedback on that replica;
    - `tfdist/step_ms`: duration of a training step with its data, without callbacks and validation;
    - with `timing`, `tfdist/encode_ms`, `tfdist/exchange_ms` and `tfdist/decode_ms`: durations per update, as
      `CommunicationReport` measures them;
    - `tfdist/checkpoint_stall_ms`: how long a save of `FailureRecovery` stalled the training;
    - `tfdist/restarts`: number of restarts of the training;
    - `tfdist/world_size`: number of workers; `tfdist/replicas`: number of replicas that share a batch;
    - for each worker of a parameter server strategy, `tfdist/samples_per_second`, and `tfdist/staleness`,
      `tfdist/bytes_pushed` and `tfdist/bytes_pulled` per step of that worker.

    A point covers the steps since the previous point. The first step of a process traces the model and does not count
    in `step_ms`. With `FailureRecovery` in the list of callbacks the curves continue where the checkpoint was saved:
    points of steps that are computed again are removed from the files. Without it the steps of several calls of `fit`
    are counted together.

    >>> import keras, numpy as np, os, tempfile
    >>> from tfdist.callbacks import TrainingMonitor
    >>> from tfdist.strategies import MirroredStrategy
    >>> with MirroredStrategy(["CPU:0", "CPU:1"], compression="int8").scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    ...     model.compile("sgd", loss="mse")
    >>> inputs, targets = np.ones([40, 64], "float32"), np.ones([40, 32], "float32")
    >>> with tempfile.TemporaryDirectory() as log_dir:
    ...     monitor = TrainingMonitor(log_dir, every_steps=5)
    ...     history = model.fit(inputs, targets, batch_size=4, verbose=0, callbacks=[monitor])
    ...     os.listdir(log_dir)  # view it with: tensorboard --logdir ...
    ['tfdist']
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every_steps: int = 10, timing: bool = False) -> None:
        """Creates the callback.

        Args:
            log_dir: Directory of this training, created if missing.
            every_steps: Writes a point after this many training steps (micro-steps, with gradient accumulation), and at
                the end of training.
            timing: Whether to measure the durations of the gradient exchange, which adds clock readings to the training
                step; see `CommunicationReport`.

        Raises:
            ValueError: If `every_steps` is not a whole number of at least 1.
        """
        super().__init__()
        check_whole_number("every_steps", every_steps, at_least=1, example=10)
        self._directory, self._every, self.timing = os.path.join(os.fspath(log_dir), "tfdist"), every_steps, timing
        # All attempts of a run that create their monitors in the same order get the same name.
        self._training = f"{run_id()}-{next(_numbers)}"
        self._restarts = RestartCount()
        self._step = 0
        self._logs: dict[str, EventLog] = {}
        check_strategies_early()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        self._close()  # files of a `fit` that raised
        self.begin_timing()
        self._writes = bool(strategy.extended.should_save_summary)
        # Steps of an earlier attempt that are in no checkpoint are computed again.
        self._forget_after = 0 if current_attempt() and not self._step else None
        self._times = StepTimes()
        if self._writes:
            recoveries = [callback for callback in self.neighbours if isinstance(callback, FailureRecovery)]
            self._communication = CommunicationScalars(strategy)
            self._stalls = SaveStalls(recoveries[0] if recoveries else None)
            self._workers = ParameterServerWorkers(strategy)
        self._written = self._step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch
        self._times.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = last_step(self.model, batch) + 1 - self._first_batch
        self._times.end(steps)
        before, self._step = self._step, self._step + steps
        if self._step // self._every != before // self._every:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        if self._step > self._written:
            self._write()
        self._close()
        self.end_timing()

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the curves, for `FailureRecovery`."""
        return {"step": self._step, "training": self._training, **self._restarts.state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues curves that another process may have begun."""
        self._step = self._written = self._forget_after = state["step"]
        self._training = state["training"]
        self._restarts.resume(state)

    def _write(self) -> None:
        self._written = self._step
        if not self._writes:
            return
        strategy, seconds = self.model.distribute_strategy, self._times.seconds
        scalars = {"restarts": float(self._restarts.number), **self._times.scalars()}
        scalars |= self._communication.scalars() | residual_norm(strategy)
        scalars |= self._stalls.scalars() | cluster_size(strategy)
        self._append("", scalars)
        for number, worker_scalars in enumerate(self._workers.scalars(seconds)):
            if worker_scalars:
                self._append(f"worker-{number}", worker_scalars)

    def _append(self, run: str, scalars: Scalars) -> None:
        if run not in self._logs:
            directory = os.path.join(self._directory, run) if run else self._directory
            self._logs[run] = EventLog(directory, self._training, forget_after=self._forget_after)
        self._logs[run].write(self._step, {_PREFIX + name: number for name, number in scalars.items()}, _DESCRIPTIONS)

    def _close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs = {}


_FRAME_BYTES = 16  # overhead of a TFRecord: length and two checksums
_NEVER = 2**62  # a step that no training reaches
_SCALAR = 1  # DATA_CLASS_SCALAR of TensorFlow's summary.proto


class EventLog:
    """A run of TensorBoard: a directory with one event file per start of a training.

    Writing does not need the package `tensorboard`. Each event is flushed, so that it survives a kill of this process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     log = EventLog(directory, "a-training")
    ...     log.write(10, {"tfdist/step_ms": 12.5}, {"tfdist/step_ms": "Duration of a step."})
    ...     log.close()
    ...     len(os.listdir(directory))
    1
    """

    def __init__(self, directory: str, training: str, *, forget_after: int | None = None) -> None:
        """Creates an event file.

        Args:
            directory: Directory of this run, created if missing. Any path that `tf.io.gfile` supports.
            training: Identifies the training in the names of its files: letters, digits and "-".
            forget_after: Removes the events of later steps from the files that earlier starts of this training wrote,
                since these steps are computed again. Files of other trainings are not changed.
        """
        tf.io.gfile.makedirs(directory)
        if forget_after is not None:
            for path in tf.io.gfile.glob(os.path.join(directory, f"events.out.tfevents.*.{training}")):
                _cut(path, forget_after)
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}.{training}"
        self._writer = tf.io.TFRecordWriter(os.path.join(directory, name))
        self._described: set[str] = set()
        self._append(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A running TensorBoard discards the steps that it has already read, from the step of a START event on; it
        # ignores the first START event that it reads.
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        first_forgotten = _NEVER if forget_after is None else forget_after + 1
        self._append(tf.compat.v1.Event(wall_time=time.time(), step=first_forgotten, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float], descriptions: Mapping[str, str]) -> None:
        """Writes one point of each curve, by tag; TensorBoard shows descriptions, which are Markdown."""
        event = tf.compat.v1.Event(wall_time=time.time(), step=step)
        for tag, number in scalars.items():
            value = event.summary.value.add(tag=tag, tensor=tf.make_tensor_proto(number, tf.float32))
            if tag not in self._described:  # TensorBoard reads the metadata of a tag's first event
                self._described.add(tag)
                value.metadata.plugin_data.plugin_name = "scalars"
                value.metadata.data_class = _SCALAR
                value.metadata.summary_description = descriptions.get(tag, "")
        self._append(event)

    def close(self) -> None:
        self._writer.close()

    def _append(self, event: tf.compat.v1.Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _cut(path: str, step: int) -> None:
    """Removes from a file the events after `step`, and a record that a killed process has not completed."""
    kept_records: list[bytes] = []
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            if event.step <= step or event.HasField("session_log"):
                kept_records.append(record)
    # Compare sizes: the reader takes an incomplete frame header for the end of the file.
    if tf.io.gfile.stat(path).length > sum(len(record) + _FRAME_BYTES for record in kept_records):
        unfinished = os.path.join(os.path.dirname(path), "unfinished")  # TensorBoard does not read files of this name
        with tf.io.TFRecordWriter(unfinished) as writer:
            for record in kept_records:
                writer.write(record)
        tf.io.gfile.rename(unfinished, path, overwrite=True)
