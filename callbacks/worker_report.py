"""WorkerReport: steps, samples, staleness and bytes, or share and waiting, of each worker; slow workers."""

import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tfdist.callbacks.plan_comparison import PlanComparison, RoundMeter
from tfdist.keras_internals.keras_callbacks import ListedCallback
from tfdist.load_balancing.row_shares import ShareStats
from tfdist.training.strategy_kinds import describe_strategy
from tfdist.training.strategy_protocol import TrainingStrategy, training_strategy
from tfdist.utils.formatting import byte_unit, table_with_total

_log = logging.getLogger("tfdist")
_SLOW_FRACTION = 0.5  # of the median rate of the other workers
_HELD_UP_FRACTION = 0.25  # of the training time
_MIN_STEPS = 4  # of each worker, for a judgement


class WorkerReport(ListedCallback):
    """Adds each worker's statistics to the logs of an epoch, names slow workers, and prints a table at the end.

    It is for models under `tfdist.strategies.ParameterServerStrategy`, and under a `MultiWorkerMirroredStrategy` with
    `load_balancing` or `shares` (see below). Under parameter servers the logs gain, for each worker `i`:

    - `worker_<i>_steps`: pushes, or parts of rounds;
    - `worker_<i>_samples_per_second`: its samples per second of the epoch's training steps;
    - `worker_<i>_seconds_at_work`: how long it had work to do;
    - `worker_<i>_staleness` and `worker_<i>_max_staleness`: number of updates by others between its pull and its push,
      the mean of the epoch and the maximum since training began;
    - `worker_<i>_bytes_pushed` and `worker_<i>_bytes_pulled`: bytes of gradients and of variables.

    A worker is slow if it processes less than half as many samples per second *at work* as the median of the others.
    The log of `tfdist` names it when it becomes slow, and names a worker that makes no step while the others train. In
    `Synchronous` mode without backup workers, a hint is logged if the others waited for the same worker during a
    quarter of the time.

    Under a strategy of `tfdist.strategies.planned()` with parameter servers a line below the table compares the plan's
    prediction of a step with what was measured after the first epoch; programs read it from `plan_comparison`.

    In the table, `late` counts the parts that rounds with backup workers have left out, and `held up s` is how long all
    others waited for this worker at the ends of rounds.

    Put this callback before the callbacks that write logs (`CSVLogger`, `TensorBoard`): Keras calls callbacks in the
    order of the list.

    ```python
    model.fit(dataset, epochs=10, callbacks=[WorkerReport()])
    ```
    ```
    Workers (150 steps in 3.3 s):
    worker  steps  late  samples  samples/s  at work  staleness  max  pushed MB  pulled MB  held up s
    -------------------------------------------------------------------------------------------------
    0         103     0      824        253     95 %       0.04    1      0.990      0.991        0.0
    1          47     0      376        116     89 %       1.04    5      0.452      0.452        0.0
    -------------------------------------------------------------------------------------------------
    total     150     0    1,200        369     92 %       0.35    5      1.442      1.443        0.0
    ```

    Where shares divide the rows of global batches, the logs gain `worker_<i>_share`, the present part of a batch as a
    fraction; `worker_<i>_samples`; `worker_<i>_compute_ms`, from when a step's data is there to its last gradient, and
    the update, without waiting; and `worker_<i>_wait_ms`, how much earlier the worker is ready than the slowest one,
    both as means of the training steps. The chief prints them:

    ```
    Workers (299 steps in 6.1 s):
    worker  share  samples  samples/step  compute ms  wait ms
    ---------------------------------------------------------
    0        66 %   12,460          41.7        14.8      1.1
    1        34 %    6,676          22.3        15.3      0.6
    ---------------------------------------------------------
    total   100 %   19,136          64.0        15.3      1.1
    ```
    """

    def __init__(self, *, print_table: bool = True, verbose: bool = False) -> None:
        """Creates the callback.

        Args:
            print_table: Whether to print `table()` when training ends.
            verbose: Whether to print a table after each epoch, too.
        """
        super().__init__()
        self._print_table, self._verbose = print_table, verbose
        self._at_begin: list[Any] = []  # each worker's statistics when training began
        self._at_epoch_begin: list[Any] = []
        self._seconds = self._epoch_seconds = 0.0  # of training steps, until the clock was last started
        self._clock_from: float | None = None
        self._of_training: list[Any] | None = None
        self._slow: set[int] = set()
        self._has_suggested = False
        self._meter: RoundMeter | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        _check_strategy(self.model.distribute_strategy)
        self.warn_of_earlier_log_writers()
        self._at_begin = self._at_epoch_begin = self._stats()
        self._seconds = self._epoch_seconds = 0.0
        self._of_training, self._slow, self._has_suggested = None, set(), False
        self._meter = RoundMeter.of(self.model.distribute_strategy)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._clock_from = time.monotonic()

    def on_test_begin(self, logs: Any = None) -> None:
        self._stop_clock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop_clock()
        done, seconds = self._since(self._at_epoch_begin), self._epoch_seconds
        if logs is not None:
            logs.update(share_logs(done) if self._has_shares else _logs(done, seconds))
        if self._verbose and self._is_chief:
            sys.stdout.write("\n".join(self._lines(f"Workers in epoch {epoch + 1}", done, seconds)) + "\n")
        if self._is_chief:
            self._warn_of_slow(done, epoch)
        if not self._has_shares:
            self._suggest_backup_worker(done, seconds)
        if self._meter is not None:
            self._meter.end_epoch(seconds)
        self._at_epoch_begin, self._epoch_seconds = self._stats(), 0.0

    def on_train_end(self, logs: Any = None) -> None:
        self._of_training = self._since(self._at_begin)
        if self._print_table and self._is_chief:
            lines = [self.table(), *([] if self.plan_comparison is None else [str(self.plan_comparison)])]
            sys.stdout.write("\n".join(lines) + "\n")

    @property
    def plan_comparison(self) -> PlanComparison | None:
        """How the plan of `tfdist.strategies.planned()` compares with what was measured, under parameter servers.

        None without a plan. Under other strategies `CommunicationReport` has it.
        """
        return None if self._meter is None else self._meter.comparison()

    def get_state(self) -> dict[str, Any]:
        """Returns the statistics since training and the epoch began, for `FailureRecovery`."""
        running = 0.0 if self._clock_from is None else time.monotonic() - self._clock_from
        return {
            "training": [asdict(count) for count in self._since(self._at_begin)],
            "epoch": [asdict(count) for count in self._since(self._at_epoch_begin)],
            "seconds": [self._seconds + running, self._epoch_seconds + running],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from `state`, unless the number of workers has changed."""
        counts = self._stats()
        if len(state["training"]) == len(counts):
            self._at_begin, self._at_epoch_begin = (
                [count.since(type(count)(**done)) for count, done in zip(counts, state[name], strict=True)]
                for name in ("training", "epoch")
            )
            self._seconds, self._epoch_seconds = state["seconds"]
            self._clock_from = None if self._clock_from is None else time.monotonic()

    def table(self) -> str:
        """Returns a table of each worker since training began, or of the complete training after its end."""
        done = self._of_training if self._of_training is not None else self._since(self._at_begin)
        return "\n".join(self._lines("Workers", done, self._seconds))

    def _lines(self, title: str, done: Sequence[Any], seconds: float) -> list[str]:
        return (share_table if self._has_shares else _table)(title, done, seconds)

    @property
    def _strategy(self) -> TrainingStrategy:
        return training_strategy(self.model.distribute_strategy)

    @property
    def _has_shares(self) -> bool:
        return self._strategy.row_shares is not None

    @property
    def _is_chief(self) -> bool:
        return self._strategy.rank == 0

    def _stats(self) -> list[Any]:
        shares = self._strategy.row_shares
        return list(self._strategy.worker_stats if shares is None else shares.stats())

    def _since(self, earlier: Sequence[Any]) -> list[Any]:
        return [count.since(before) for count, before in zip(self._stats(), earlier, strict=True)]

    def _stop_clock(self) -> None:
        if self._clock_from is not None:
            passed = time.monotonic() - self._clock_from
            self._seconds, self._epoch_seconds = self._seconds + passed, self._epoch_seconds + passed
            self._clock_from = None

    def _warn_of_slow(self, done: Sequence[Any], epoch: int) -> None:
        slow = set()
        for worker, count in enumerate(done):
            other_counts = [other_count for number, other_count in enumerate(done) if number != worker]
            if not other_counts or min(other_count.steps for other_count in other_counts) < _MIN_STEPS:
                continue
            median = statistics.median(_rate(other_count.samples, other_count.seconds) for other_count in other_counts)
            if count.steps == 0:
                slow.add(worker)
                message = f"worker {worker} made no step in epoch {epoch + 1}: it has ended or does not answer"
            elif count.steps >= _MIN_STEPS and (rate := _rate(count.samples, count.seconds)) < _SLOW_FRACTION * median:
                slow.add(worker)
                message = (
                    f"worker {worker} is slow: {rate:,.0f} samples per second at work in epoch {epoch + 1}; the median "
                    f"of the others is {median:,.0f}"
                )
            if worker in slow - self._slow:
                _log.warning("WorkerReport: %s.", message)
        self._slow = slow

    def _suggest_backup_worker(self, done: Sequence[Any], seconds: float) -> None:
        mode = self.model.distribute_strategy.mode
        waited = [count.held_up_seconds for count in done]
        worst = max(range(len(done)), key=waited.__getitem__)
        is_single = waited[worst] > sum(waited) / 2 and waited[worst] > _HELD_UP_FRACTION * seconds
        has_enough = min(count.steps for count in done) >= _MIN_STEPS
        if self._has_suggested or not is_single or not has_enough or getattr(mode, "backup_workers", None) != 0:
            return
        self._has_suggested = True
        _log.warning(
            "WorkerReport: the others waited for worker %d during %.0f %% of the time. "
            "`Synchronous(backup_workers=1)` ends each round without its slowest worker.",
            worst,
            100 * waited[worst] / seconds,
        )


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if seconds > 0 else 0.0


def _logs(done: Sequence[Any], seconds: float) -> dict[str, float]:
    logs: dict[str, float] = {}
    for worker, count in enumerate(done):
        values = {
            "steps": count.steps,
            "samples_per_second": _rate(count.samples, seconds),
            "seconds_at_work": count.seconds,
            "staleness": count.staleness,
            "max_staleness": count.max_staleness,
            "bytes_pushed": count.bytes_pushed,
            "bytes_pulled": count.bytes_pulled,
        }
        logs |= {f"worker_{worker}_{name}": float(value) for name, value in values.items()}
    return logs


def _table(title: str, done: Sequence[Any], seconds: float) -> list[str]:
    steps = sum(count.steps for count in done)
    size, unit = byte_unit(max(sum(count.bytes_pushed for count in done), sum(count.bytes_pulled for count in done)))

    def row(name: str, counts: Sequence[Any]) -> list[str]:
        row_steps = sum(count.steps for count in counts)
        return [
            name,
            f"{row_steps:,}",
            f"{sum(count.left_out for count in counts):,}",
            f"{sum(count.samples for count in counts):,}",
            f"{_rate(sum(count.samples for count in counts), seconds):,.0f}",
            f"{100 * _rate(sum(count.seconds for count in counts), seconds * len(counts)):.0f} %",
            f"{sum(count.staleness * count.steps for count in counts) / max(row_steps, 1):.2f}",
            f"{max(count.max_staleness for count in counts)}",
            f"{sum(count.bytes_pushed for count in counts) / size:.3f}",
            f"{sum(count.bytes_pulled for count in counts) / size:.3f}",
            f"{sum(count.held_up_seconds for count in counts):.1f}",
        ]

    head = ["worker", "steps", "late", "samples", "samples/s", "at work", "staleness", "max"]
    rows = [head + [f"pushed {unit}", f"pulled {unit}", "held up s"]]
    rows += [row(str(worker), [count]) for worker, count in enumerate(done)]
    return [f"{title} ({steps:,} steps in {seconds:.1f} s):", *table_with_total([*rows, row("total", done)])]


def _check_strategy(strategy: Any) -> None:
    ours = training_strategy(strategy)
    measures = ours.row_shares is not None and ours.row_shares.measures
    has_shares = measures and ours.local_updates is None  # times are not exchanged between these
    if not ours.worker_stats and not has_shares:
        raise ValueError(
            "WorkerReport is for workers that push to parameter servers, or share the rows of a batch. Received: a "
            f"model created under {describe_strategy(strategy)}. Expected: "
            "`tfdist.strategies.ParameterServerStrategy`, or "
            "`MultiWorkerMirroredStrategy(load_balancing=True)` on several workers. Under other strategies all workers "
            "make the same steps; `tfdist.callbacks.CommunicationReport` reports the bytes that they send."
        )


def share_logs(done: Sequence[ShareStats]) -> dict[str, float]:
    """Returns the logs of an epoch.

    >>> sorted(share_logs([ShareStats(1.0, 2, 16, 0.25, 0.0)]))[:2]
    ['worker_0_compute_ms', 'worker_0_samples']
    """
    logs: dict[str, float] = {}
    for worker, stats in enumerate(done):
        values = {
            "share": stats.share,
            "samples": stats.samples,
            "compute_ms": _per_step(stats.seconds, stats.steps),
            "wait_ms": _per_step(stats.waited_seconds, stats.steps),
        }
        logs |= {f"worker_{worker}_{name}": float(value) for name, value in values.items()}
    return logs


def share_table(title: str, done: Sequence[ShareStats], seconds: float) -> list[str]:
    r"""Returns the lines of a table.

    >>> print("\n".join(share_table("Workers", [ShareStats(0.25, 2, 16, 0.1), ShareStats(0.75, 2, 48, 0.1)], 0.5)))
    Workers (2 steps in 0.5 s):
    worker  share  samples  samples/step  compute ms  wait ms
    ---------------------------------------------------------
    0        25 %       16           8.0        50.0      0.0
    1        75 %       48          24.0        50.0      0.0
    ---------------------------------------------------------
    total   100 %       64          32.0        50.0      0.0
    """

    def row(name: str, counts: Sequence[ShareStats]) -> list[str]:
        steps = counts[0].steps
        return [
            name,
            f"{100 * sum(count.share for count in counts):.0f} %",
            f"{sum(count.samples for count in counts):,}",
            f"{sum(count.samples for count in counts) / max(steps, 1):.1f}",
            f"{max(_per_step(count.seconds, steps) for count in counts):.1f}",
            f"{max(_per_step(count.waited_seconds, steps) for count in counts):.1f}",
        ]

    rows = [["worker", "share", "samples", "samples/step", "compute ms", "wait ms"]]
    rows += [row(str(worker), [stats]) for worker, stats in enumerate(done)]
    return [f"{title} ({done[0].steps:,} steps in {seconds:.1f} s):", *table_with_total([*rows, row("total", done)])]


def _per_step(seconds: float, steps: int) -> float:
    return 1e3 * seconds / max(steps, 1)
