"""What the exchange of gradients costs: bytes and, on request, seconds of an update, in the logs and as a table."""

import sys
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks.log_writers import warn_of_earlier_writers
from tfdist.callbacks.other_strategies import check_early, described, replacement_of
from tfdist.callbacks.tables import aligned, unit_of
from tfdist.callbacks.timing import begin_timing, end_timing
from tfdist.collectives import Durations, TrafficCount
from tfdist.collectives.traffic import GRADIENTS
from tfdist.keras_internals.optimizers import OptimizerUpdate


class CommunicationReport(keras.callbacks.Callback):
    """Adds to the logs what an update of the optimizer has sent, and prints a table of it when training ends.

    The logs gain, as averages over the updates since the last report (so by update, not by micro-step, where gradients
    are accumulated):

    - `dense_bytes`: what this worker's first replica would have sent of gradients without compression;
    - `wire_bytes`: what it has sent;
    - `compression_ratio`: the first divided by the second; 1 where nothing was sent;
    - with `timing`, `encode_seconds`, `exchange_seconds` and `decode_seconds`.

    Where no update was made since the last report, the last numbers stand. The table has a row for each method of
    compression; variables too small for a method travel along with it uncompressed, and count with it. Where a worker
    has several devices and there are other workers, only what travels between workers counts. Metrics, batch
    statistics and sample counts, which travel too, are not counted.

    Put it before the callbacks that write logs (`CSVLogger`, `TensorBoard`): callbacks are called in the order of the
    list, and share the logs. `History` and the progress bar, which Keras puts last, need nothing.

    Times are taken in the graph, on this worker's first replica: from the gradients of a bucket being there until
    its first collective can start, and between collectives (encode); within collectives, waiting for slower workers
    included (exchange); from the last result to the sums (decode). Buckets overlap each other and the computation,
    and their times are added up, so that these seconds may exceed those of a step. Where all cores are busy, waiting
    for one counts too, and a reading of the clock may come some milliseconds late. What a method remembers
    (residuals) is not timed. The clock is read twice a collective and twice a bucket, each time by a call of Python;
    the training step is traced anew when training begins and when it ends. Without `timing` nothing is added.

    >>> import keras, numpy as np
    >>> from tfdist.callbacks import CommunicationReport
    >>> from tfdist.strategies import MirroredStrategy
    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"], compression="bf16")
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(32)])
    ...     model.compile("sgd", loss="mse")
    >>> inputs, targets = np.ones([64, 256], "float32"), np.ones([64, 32], "float32")
    >>> history = model.fit(inputs, targets, batch_size=16, verbose=0, callbacks=[CommunicationReport()])
    Gradients sent per update by this worker's first replica (4 updates, 2 replicas):
    method                  variables  values  dense kB  wire kB  ratio
    -------------------------------------------------------------------
    Cast(dtype='bfloat16')          2   8,224    32.896   16.512   1.99
    -------------------------------------------------------------------
    total                           2   8,224    32.896   16.512   1.99
    >>> history.history["dense_bytes"]
    [32896.0]
    """

    def __init__(self, *, timing: bool = False, print_table: bool = True, update_freq: str = "epoch") -> None:
        """Describes the report.

        Args:
          timing: whether seconds are taken too.
          print_table: whether the chief prints `table()` when training ends.
          update_freq: "epoch", or "batch" for reports after every batch too (of `steps_per_execution` steps), which
            then hold what came since the batch before.

        Raises:
          ValueError: `update_freq` is not what is expected.
        """
        super().__init__()
        if update_freq not in ("epoch", "batch"):
            raise ValueError(
                f"`update_freq` is not a frequency of reports. Received: update_freq={update_freq!r}. "
                "Expected: 'epoch' or 'batch'."
            )
        self.takes_times, self._print_table, self._by_batch = timing, print_table, update_freq == "batch"
        # Keras may then call the batches' ends from another thread, in which this callback does nothing.
        self.async_safe = not self._by_batch
        self._began = self._epoch_reported = self._batch_reported = _Reading()
        self._training: _Reading | None = None
        self._last_logs = _Reading().logs(timing)
        check_early()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        _refuse_others(strategy)
        warn_of_earlier_writers(self)
        if self.takes_times:
            begin_timing(self)
        self._began = self._epoch_reported = self._batch_reported = _Reading.of(strategy)
        self._training = None
        self._last_logs = _Reading().logs(self.takes_times)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._by_batch:
            reading = _Reading.of(self.model.distribute_strategy)
            self._report(reading.since(self._batch_reported), logs)
            self._batch_reported = reading

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        reading = _Reading.of(self.model.distribute_strategy)
        self._report(reading.since(self._epoch_reported), logs)
        self._epoch_reported = reading

    def on_train_end(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        self._training = _Reading.of(strategy).since(self._began)
        if self.takes_times:
            end_timing(self)
        if self._print_table and getattr(strategy, "rank", 0) == 0:
            sys.stdout.write(self.table() + "\n")

    def get_state(self) -> dict[str, Any]:
        """What was counted since the training, the epoch and the last report began, for `FailureRecovery`."""
        reading = _Reading.of(self.model.distribute_strategy)
        began = {"began": self._began, "epoch": self._epoch_reported, "batch": self._batch_reported}
        return {name: asdict(reading.since(earlier)) for name, earlier in began.items()} | {"logs": self._last_logs}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on counting from `state`, in a process whose own counters began anew."""
        reading = _Reading.of(self.model.distribute_strategy)
        self._began, self._epoch_reported, self._batch_reported = (
            reading.since(_Reading.from_dict(state[name])) for name in ("began", "epoch", "batch")
        )
        self._last_logs = state["logs"]

    def table(self) -> str:
        """What was sent since training began, or in the training that has ended, as lines of aligned columns."""
        strategy = self.model.distribute_strategy
        if strategy.num_replicas_in_sync == 1:
            return "There is one replica: no gradients travel."
        reading = self._training or _Reading.of(strategy).since(self._began)
        if not reading.updates:
            return "There was no update: no gradients travelled."
        paths = set(OptimizerUpdate(self.model.optimizer, self.model.trainable_variables).paths)
        values = {
            method: [number for path, number in by_path.items() if path in paths]
            for method, by_path in strategy.values_by_method.items()
        }
        title = (
            f"Gradients sent per update by this worker's first replica ({reading.updates:,} "
            f"update{'s' * (reading.updates > 1)}, {strategy.num_replicas_in_sync} replicas):"
        )
        return "\n".join([title, *aligned(_rows(reading, values, self.takes_times))])

    def _report(self, reading: "_Reading", logs: Any) -> None:
        if reading.updates:
            self._last_logs = reading.logs(self.takes_times)
        if logs is not None:
            logs.update(self._last_logs)


@dataclass(frozen=True)
class _Reading:
    """What a worker's first replica has counted, by method."""

    updates: int = 0
    counts: dict[str, TrafficCount] = field(default_factory=dict)
    durations: dict[str, Durations] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Any) -> "_Reading":
        if not _is_counted(strategy):
            return cls()
        return cls(strategy.communication.updates, strategy.communication_by_method, strategy.durations_by_method)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "_Reading":
        """What `asdict` has made of a reading."""
        counts = {name: TrafficCount(**count) for name, count in values["counts"].items()}
        durations = {name: Durations(**time) for name, time in values["durations"].items()}
        return cls(values["updates"], counts, durations)

    def since(self, earlier: "_Reading") -> "_Reading":
        counts = {
            name: self.counts.get(name, TrafficCount()) - earlier.counts.get(name, TrafficCount())
            for name in {**self.counts, **earlier.counts}
        }
        spent = {
            name: self.durations.get(name, Durations()) - earlier.durations.get(name, Durations())
            for name in {**self.durations, **earlier.durations}
        }
        return _Reading(self.updates - earlier.updates, counts, spent)

    def logs(self, timing: bool) -> dict[str, float]:
        """The entries of the logs: averages over the updates."""
        count, time = sum(self.counts.values(), TrafficCount()), sum(self.durations.values(), Durations())
        updates = max(self.updates, 1)
        logs = {
            "dense_bytes": count.dense_bytes / updates,
            "wire_bytes": count.wire_bytes / updates,
            "compression_ratio": float(count.compression_ratio),
        }
        return logs | {name: seconds / updates for name, seconds in asdict(time).items()} if timing else logs


def _rows(reading: _Reading, values: dict[str, list[int]], timing: bool) -> list[list[str]]:
    """The cells of the table: its head, a row a method, and the total."""
    counts = {method: count for method, count in reading.counts.items() if count.dense_bytes or count.wire_bytes}
    largest = sum(count.dense_bytes for count in counts.values()) / reading.updates
    unit_bytes, unit = unit_of(largest)

    def row(name: str, numbers: list[int], count: TrafficCount, time: Durations) -> list[str]:
        cells = [name, f"{len(numbers):,}", f"{sum(numbers):,}"]
        cells += [f"{nbytes / reading.updates / unit_bytes:.3f}" for nbytes in (count.dense_bytes, count.wire_bytes)]
        cells.append(f"{count.compression_ratio:.2f}")
        return cells + [f"{seconds / reading.updates * 1e3:.3f}" for seconds in astuple(time)] * timing

    head = ["method", "variables", "values", f"dense {unit}", f"wire {unit}", "ratio"]
    rows = [head + ["encode ms", "exchange ms", "decode ms"] * timing]
    for method, count in counts.items():
        name = "uncompressed" if method == GRADIENTS else method
        rows.append(row(name, values.get(method, []), count, reading.durations.get(method, Durations())))
    all_values = [number for method in counts for number in values.get(method, [])]
    total = sum(counts.values(), TrafficCount()), sum(reading.durations.values(), Durations())
    return [*rows, row("total", all_values, *total)]


def _is_counted(strategy: Any) -> bool:
    return hasattr(strategy, "communication_by_method")


def _refuse_others(strategy: Any) -> None:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            "Under parameter servers each worker pushes for itself, and no sum is exchanged. Received: "
            "CommunicationReport for a model made under ParameterServerStrategy. Expected: "
            "`tfdist.callbacks.WorkerReport`, which tells what each worker pushes and pulls. Put that in its place."
        )
    if not _is_counted(strategy) and strategy.num_replicas_in_sync > 1:
        replacement = replacement_of(strategy)
        raise ValueError(
            "What this strategy sends is not counted. "
            f"Received: a model made under {described(strategy)} with {strategy.num_replicas_in_sync} replicas. "
            "Expected: a strategy of `tfdist.strategies`, or one process. "
            + (f"Make the model under `{replacement}`." if replacement else "Leave CommunicationReport out.")
        )
