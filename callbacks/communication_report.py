"""CommunicationReport: bytes and durations of the gradient exchange and of links, in the logs and as a table."""

import sys
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.callbacks.plan_comparison import PlanComparison, StepMeter
from tfdist.callbacks.strategy_support import check_strategies_early
from tfdist.collectives import CommunicationStats, ExchangeDurations, LinkStats
from tfdist.collectives.byte_counters import GRADIENTS, counted_since
from tfdist.keras_internals.epoch_iterator import last_step
from tfdist.keras_internals.keras_callbacks import ListedCallback
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.training.strategy_kinds import describe_strategy, suggested_replacement
from tfdist.training.strategy_protocol import training_strategy
from tfdist.utils.argument_checks import check_whole_number
from tfdist.utils.formatting import byte_unit, short_device, table_with_total


@dataclass(frozen=True)
class LinkReading:
    """What the devices of a strategy with stages have sent in training steps."""

    # The counts of each link, by the full names of the sending and the receiving device with a space between.
    links: dict[str, LinkStats] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Any) -> "LinkReading | None":
        """Reads the counters of a strategy; None if its models have no stages."""
        links = training_strategy(strategy).communication_by_link("train_step")
        return None if links is None else cls({" ".join(link): stats for link, stats in links.items()})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LinkReading":
        """Restores a reading from the result of `asdict`."""
        return cls({name: LinkStats(**stats) for name, stats in values["links"].items()})

    def since(self, earlier: "LinkReading | None") -> "LinkReading":
        """Returns what was counted after `earlier`; None is a reading of zeros."""
        return LinkReading(counted_since({} if earlier is None else earlier.links, self.links, LinkStats()))

    def logs(self, updates: int) -> dict[str, float]:
        """Returns the entries of the logs: averages over the updates."""
        total = sum(self.links.values(), LinkStats())
        return {
            "activation_bytes": total.activation_bytes / updates,
            "activation_gradient_bytes": total.activation_gradient_bytes / updates,
        }

    def table(self, updates: int) -> str:
        """Returns a table with a row for each link, of averages over the updates."""
        if not updates:
            return "There was no update: no gradients were exchanged."
        total = sum(self.links.values(), LinkStats())
        unit_bytes, unit = byte_unit(total.total_bytes / updates)

        def row(name: str, stats: LinkStats) -> list[str]:
            other_bytes = stats.weight_bytes + stats.prediction_bytes
            numbers = [stats.batch_bytes, stats.activation_bytes, stats.activation_gradient_bytes]
            numbers += [stats.weight_gradient_bytes, other_bytes, stats.total_bytes]
            return [name, *(f"{number / updates / unit_bytes:.3f}" for number in numbers)]

        kinds = ["batches", "activations", "their gradients", "weight gradients", "other", "total"]
        rows = [
            row(" -> ".join(map(short_device, name.split())), link_stats)
            for name, link_stats in sorted(self.links.items())
        ]
        title = f"{unit} sent per update from device to device ({updates:,} update{'s' * (updates > 1)}):"
        return "\n".join([title, *table_with_total([["link", *kinds], *rows, row("total", total)])])


class ExchangeTimingCallback(ListedCallback):
    """A callback that can have the training step take the times of the gradient exchange.

    The first such callback of a list starts the timing, and the last one stops it.
    """

    timing = False  # whether this callback asks for times

    def begin_timing(self) -> None:
        """Starts timing from zero. The step is traced again. Call this in `on_train_begin`."""
        if self._timed_callbacks()[:1] == [self]:
            self._time(True)

    def end_timing(self) -> None:
        """Stops timing. Call this in `on_train_end`."""
        if self._timed_callbacks()[-1:] == [self]:
            self._time(False)

    def _timed_callbacks(self) -> list[Any]:
        listed = self.neighbours or (self,)
        return [callback for callback in listed if isinstance(callback, ExchangeTimingCallback) and callback.timing]

    def _time(self, enabled: bool) -> None:
        reduction = training_strategy(self.model.distribute_strategy).gradient_reduction
        if reduction is not None:
            reduction.measure_durations(enabled)
            self.model.make_train_function(force=True)


class CommunicationReport(ExchangeTimingCallback):
    """Adds the costs of the gradient exchange to the logs, and prints a table when training ends.

    The logs gain these averages over the updates of the optimizer since the last report. With gradient accumulation
    they are per update, not per micro-step:

    - `dense_bytes`: bytes of gradients that this worker's first replica would have sent without compression;
    - `wire_bytes`: bytes that it has sent;
    - `compression_ratio`: the first divided by the second; 1 if nothing was sent;
    - with `timing`, `encode_seconds`, `exchange_seconds` and `decode_seconds`;
    - under `ModelParallelStrategy`, where the first three are over all devices, `activation_bytes` and
      `activation_gradient_bytes`: what stages have sent to each other. The table has a row for each link.

    Without an update since the last report, the previous numbers are repeated. The table has a row for each compression
    method. Variables too small for a method are sent with its payload uncompressed, and count in its row. If a worker
    has several devices and there are other workers, only the bytes sent between workers count. Metrics, batch
    statistics and sample counts are sent too, but not counted.

    Under a strategy of `tfdist.strategies.planned()` a line below the table compares the plan's prediction of a step
    with what was measured; programs read it from `plan_comparison`.

    Put this callback before the callbacks that write logs (`CSVLogger`, `TensorBoard`): Keras calls callbacks in the
    order of the list, and they share the logs. `History` and the progress bar always come last.

    Durations are measured in the graph, on this worker's first replica. Encode: from the gradients of a bucket to the
    start of its first collective, and between collectives. Exchange: in collectives, including waiting for slower
    workers. Decode: from the last result to the sums. Buckets overlap each other and the computation, and their
    durations are summed, so that they may exceed the duration of a step. If all cores are busy, waiting for a core
    counts, and clock readings may be some milliseconds late. Updating residuals is not measured. The clock is read
    twice per collective and twice per bucket, each time by a call of Python. The training step is traced again when
    training begins and when it ends. Without `timing` nothing is added to the step.

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

    def __init__(self, *, timing: bool = False, print_table: bool = True, every_steps: int | None = None) -> None:
        """Creates the callback.

        Args:
            timing: Whether to measure durations, too.
            print_table: Whether the chief prints `table()` when training ends.
            every_steps: Also reports after this many training steps (micro-steps, with gradient accumulation), in the
                logs of that batch; averages are then over the updates since the previous such report. None: only at the
                end of each epoch.

        Raises:
            ValueError: If `every_steps` is neither None nor a whole number of at least 1.
        """
        super().__init__()
        if every_steps is not None:
            check_whole_number("every_steps", every_steps, at_least=1, example=10)
        self.timing, self._print_table, self._every = timing, print_table, every_steps
        # Lets Keras call `on_train_batch_end` from another thread. Without `every_steps` it only notes a number.
        self.async_safe = every_steps is None
        self._step = self._first_batch = 0
        self._at_begin = self._at_epoch_end = self._at_step = _Reading()
        self._of_training: _Reading | None = None
        self._meter: StepMeter | None = None
        self._last_logs = _Reading().logs(timing)
        check_strategies_early()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        _check_strategy(strategy)
        self.warn_of_earlier_log_writers()
        self.begin_timing()
        self._meter = StepMeter.of(strategy)
        self._step = 0
        self._at_begin = self._at_epoch_end = self._at_step = _Reading.of(strategy)
        self._of_training = None
        self._last_logs = self._at_begin.since(self._at_begin).logs(self.timing)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch
        if self._meter is not None:
            self._meter.begin_steps(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        last = last_step(self.model, batch)
        if self._meter is not None:
            self._meter.end_steps(last)
        if self._every is None:
            return
        before, self._step = self._step, self._step + last + 1 - self._first_batch
        if self._step // self._every != before // self._every:
            reading = _Reading.of(self.model.distribute_strategy)
            self._report(reading.since(self._at_step), logs)
            self._at_step = reading

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        reading = _Reading.of(self.model.distribute_strategy)
        self._report(reading.since(self._at_epoch_end), logs)
        self._at_epoch_end = reading
        if self._meter is not None:
            self._meter.end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        self._of_training = _Reading.of(strategy).since(self._at_begin)
        self.end_timing()
        if self._print_table and training_strategy(strategy).rank == 0:
            lines = [self.table(), *([] if self.plan_comparison is None else [str(self.plan_comparison)])]
            sys.stdout.write("\n".join(lines) + "\n")

    @property
    def plan_comparison(self) -> PlanComparison | None:
        """How the plan of `tfdist.strategies.planned()` compares with what was measured; None without a plan."""
        return None if self._meter is None else self._meter.comparison()

    def get_state(self) -> dict[str, Any]:
        """Returns the counts since training, the epoch and the last report began, for `FailureRecovery`."""
        reading = _Reading.of(self.model.distribute_strategy)
        began = {"training": self._at_begin, "epoch": self._at_epoch_end, "report": self._at_step}
        counts = {name: asdict(reading.since(earlier)) for name, earlier in began.items()}
        return counts | {"logs": self._last_logs, "step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`, in a process whose counters begin at zero."""
        reading = _Reading.of(self.model.distribute_strategy)
        self._at_begin, self._at_epoch_end, self._at_step = (
            reading.since(_Reading.from_dict(state[name])) for name in ("training", "epoch", "report")
        )
        self._last_logs, self._step = state["logs"], state["step"]

    def table(self) -> str:
        """Returns a table of the costs since training began, or of the complete training after its end."""
        strategy = self.model.distribute_strategy
        reading = self._of_training or _Reading.of(strategy).since(self._at_begin)
        if reading.links is not None:
            return reading.links.table(reading.updates)
        if strategy.num_replicas_in_sync == 1:
            return "There is one replica: no gradients are exchanged."
        if not reading.updates:
            return "There was no update: no gradients were exchanged."
        paths = set(OptimizerUpdate(self.model.optimizer, self.model.trainable_variables).paths)
        values = {
            method: [number for path, number in by_path.items() if path in paths]
            for method, by_path in strategy.gradient_reduction.counters.sizes().items()
        }
        title = (
            f"Gradients sent per update by this worker's first replica ({reading.updates:,} "
            f"update{'s' * (reading.updates > 1)}, {strategy.num_replicas_in_sync} replicas):"
        )
        return "\n".join([title, *table_with_total(_rows(reading, values, self.timing))])

    def _report(self, reading: "_Reading", logs: Any) -> None:
        if reading.updates:
            self._last_logs = reading.logs(self.timing)
        if logs is not None:
            logs.update(self._last_logs)


@dataclass(frozen=True)
class _Reading:
    """Counters of a worker's first replica, by compression method; under stages those of all devices, by link."""

    updates: int = 0
    counts: dict[str, CommunicationStats] = field(default_factory=dict)
    durations: dict[str, ExchangeDurations] = field(default_factory=dict)
    links: LinkReading | None = None

    @classmethod
    def of(cls, strategy: Any) -> "_Reading":
        if (links := LinkReading.of(strategy)) is not None:
            count = strategy.communication
            return cls(count.updates, {GRADIENTS: count}, links=links)
        reduction = training_strategy(strategy).gradient_reduction
        if reduction is None:
            return cls()
        return cls(strategy.communication.updates, reduction.counters.by_label(), reduction.durations_by_method())

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "_Reading":
        """Restores a reading from the result of `asdict`."""
        counts = {name: CommunicationStats(**count) for name, count in values["counts"].items()}
        durations = {name: ExchangeDurations(**time) for name, time in values["durations"].items()}
        links = values.get("links")
        return cls(values["updates"], counts, durations, links and LinkReading.from_dict(links))

    def since(self, earlier: "_Reading") -> "_Reading":
        counts = counted_since(earlier.counts, self.counts, CommunicationStats())
        spent = counted_since(earlier.durations, self.durations, ExchangeDurations())
        links = None if self.links is None else self.links.since(earlier.links)
        return _Reading(self.updates - earlier.updates, counts, spent, links)

    def logs(self, timing: bool) -> dict[str, float]:
        """Returns the entries of the logs: averages over the updates."""
        count, time = sum(self.counts.values(), CommunicationStats()), sum(self.durations.values(), ExchangeDurations())
        updates = max(self.updates, 1)
        logs = {
            "dense_bytes": count.dense_bytes / updates,
            "wire_bytes": count.wire_bytes / updates,
            "compression_ratio": float(count.compression_ratio),
        }
        if self.links is not None:
            return logs | self.links.logs(updates)
        return logs | {name: seconds / updates for name, seconds in asdict(time).items()} if timing else logs


def _rows(reading: _Reading, values: dict[str, list[int]], timing: bool) -> list[list[str]]:
    """Returns the cells of the table: headings, one row per method, total."""
    counts = {method: count for method, count in reading.counts.items() if count.dense_bytes or count.wire_bytes}
    largest = sum(count.dense_bytes for count in counts.values()) / reading.updates
    unit_bytes, unit = byte_unit(largest)

    def row(name: str, numbers: list[int], count: CommunicationStats, time: ExchangeDurations) -> list[str]:
        cells = [name, f"{len(numbers):,}", f"{sum(numbers):,}"]
        cells += [f"{nbytes / reading.updates / unit_bytes:.3f}" for nbytes in (count.dense_bytes, count.wire_bytes)]
        cells.append(f"{count.compression_ratio:.2f}")
        return cells + [f"{seconds / reading.updates * 1e3:.3f}" for seconds in astuple(time)] * timing

    head = ["method", "variables", "values", f"dense {unit}", f"wire {unit}", "ratio"]
    rows = [head + ["encode ms", "exchange ms", "decode ms"] * timing]
    for method, count in counts.items():
        name = "uncompressed" if method == GRADIENTS else method
        rows.append(row(name, values.get(method, []), count, reading.durations.get(method, ExchangeDurations())))
    all_values = [number for method in counts for number in values.get(method, [])]
    total = sum(counts.values(), CommunicationStats()), sum(reading.durations.values(), ExchangeDurations())
    return [*rows, row("total", all_values, *total)]


def _check_strategy(strategy: Any) -> None:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise ValueError(
            "Under parameter servers each worker pushes its gradients, and replicas exchange none. Received: "
            "CommunicationReport for a model created under ParameterServerStrategy. Expected: "
            "`tfdist.callbacks.WorkerReport`, which reports the bytes that each worker pushes and pulls. Use that one."
        )
    if training_strategy(strategy).gradient_reduction is None and strategy.num_replicas_in_sync > 1:
        replacement = suggested_replacement(strategy)
        raise ValueError(
            "This strategy does not count the bytes that it sends. Received: a model created under "
            f"{describe_strategy(strategy)} with {strategy.num_replicas_in_sync} replicas. Expected: a strategy of "
            "`tfdist.strategies`, or one process. "
            + (f"Create the model under `{replacement}`." if replacement else "Remove CommunicationReport.")
        )
