"""What each worker of a parameter server strategy does: steps, samples, staleness and bytes, and who is slow."""

import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import keras

from tfdist.callbacks.log_writers import warn_of_earlier_writers
from tfdist.callbacks.other_strategies import described
from tfdist.callbacks.tables import aligned, unit_of

_log = logging.getLogger("tfdist")
_SLOW = 0.5  # of the median of the other workers
_HOLDS_UP = 0.25  # of the time of training, and most of all that is waited for
_ENOUGH_STEPS = 4  # a worker, to judge by


class WorkerReport(keras.callbacks.Callback):
    """Adds to the logs of an epoch what each worker has done, names slow workers, and prints a table at the end.

    For models under `tfdist.strategies.ParameterServerStrategy`. The logs gain, for each worker `i`:

    - `worker_<i>_steps`: pushes, or parts of rounds;
    - `worker_<i>_samples_per_second`: its samples, by the time of the epoch's training steps;
    - `worker_<i>_seconds_at_work`: how long it had something to do;
    - `worker_<i>_staleness` and `worker_<i>_max_staleness`: how many updates of others lay between its pull and its
      push, on average, and at most since training began;
    - `worker_<i>_bytes_pushed` and `worker_<i>_bytes_pulled`: bytes of gradients and of variables.

    A worker is slow if it makes less than half as many samples a second *at work* as the median of the others; it is
    named in the log of `tfdist` when it becomes so, and so is one that does nothing while the others train. In
    `Synchronous` mode without backup workers a hint says when the others waited for one and the same worker for a
    quarter of the time.

    In the table, `late` counts parts that backup workers' rounds have left out, and `held up s` how long all others
    waited for this worker at the ends of rounds.

    Put it before the callbacks that write logs (`CSVLogger`, `TensorBoard`), which are called in the order of the list.

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
    """

    def __init__(self, *, print_table: bool = True, verbose: bool = False) -> None:
        """Describes the report.

        Args:
          print_table: whether `table()` is printed when training ends.
          verbose: whether the table of each epoch is printed, too.
        """
        super().__init__()
        self._print_table, self._verbose = print_table, verbose
        self._began: list[Any] = []  # what each worker had done when training began, and when the epoch did
        self._epoch_began: list[Any] = []
        self._seconds = self._epoch_seconds = 0.0  # of training steps, until the clock was last started
        self._clock_from: float | None = None
        self._ended: list[Any] | None = None
        self._slow: set[int] = set()
        self._hinted = False

    def on_train_begin(self, logs: Any = None) -> None:
        _refuse_others(self.model.distribute_strategy)
        warn_of_earlier_writers(self)
        self._began = self._epoch_began = self._counts()
        self._seconds = self._epoch_seconds = 0.0
        self._ended, self._slow, self._hinted = None, set(), False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._clock_from = time.monotonic()

    def on_test_begin(self, logs: Any = None) -> None:
        self._stop_clock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop_clock()
        done, seconds = self._since(self._epoch_began), self._epoch_seconds
        if logs is not None:
            logs.update(_logs(done, seconds))
        if self._verbose:
            sys.stdout.write("\n".join(_table(f"Workers in epoch {epoch + 1}", done, seconds)) + "\n")
        self._name_slow(done, epoch)
        self._hint(done, seconds)
        self._epoch_began, self._epoch_seconds = self._counts(), 0.0

    def on_train_end(self, logs: Any = None) -> None:
        self._ended = self._since(self._began)
        if self._print_table:
            sys.stdout.write(self.table() + "\n")

    def get_state(self) -> dict[str, Any]:
        """What was done since the training and the epoch began, for `FailureRecovery`."""
        running = 0.0 if self._clock_from is None else time.monotonic() - self._clock_from
        return {
            "training": [asdict(count) for count in self._since(self._began)],
            "epoch": [asdict(count) for count in self._since(self._epoch_began)],
            "seconds": [self._seconds + running, self._epoch_seconds + running],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on counting from `state`, unless there are other workers now."""
        counts = self._counts()
        if len(state["training"]) == len(counts):
            self._began, self._epoch_began = (
                [count.since(type(count)(**done)) for count, done in zip(counts, state[name], strict=True)]
                for name in ("training", "epoch")
            )
            self._seconds, self._epoch_seconds = state["seconds"]
            self._clock_from = None if self._clock_from is None else time.monotonic()

    def table(self) -> str:
        """What each worker has done since training began, or in the training that has ended, as aligned columns."""
        done = self._ended if self._ended is not None else self._since(self._began)
        return "\n".join(_table("Workers", done, self._seconds))

    def _counts(self) -> list[Any]:
        return list(self.model.distribute_strategy.worker_counts)

    def _since(self, earlier: Sequence[Any]) -> list[Any]:
        return [count.since(before) for count, before in zip(self._counts(), earlier, strict=True)]

    def _stop_clock(self) -> None:
        if self._clock_from is not None:
            passed = time.monotonic() - self._clock_from
            self._seconds, self._epoch_seconds = self._seconds + passed, self._epoch_seconds + passed
            self._clock_from = None

    def _name_slow(self, done: Sequence[Any], epoch: int) -> None:
        slow = set()
        for worker, count in enumerate(done):
            others = [other for number, other in enumerate(done) if number != worker]
            if not others or min(other.steps for other in others) < _ENOUGH_STEPS:
                continue
            median = statistics.median(_rate(other.samples, other.seconds) for other in others)
            if count.steps == 0:
                slow.add(worker)
                message = f"worker {worker} did nothing in epoch {epoch + 1}: it is gone, or does not answer"
            elif count.steps >= _ENOUGH_STEPS and _rate(count.samples, count.seconds) < _SLOW * median:
                slow.add(worker)
                message = (
                    f"worker {worker} is slow: {_rate(count.samples, count.seconds):,.0f} samples a second at work in "
                    f"epoch {epoch + 1}; the median of the others is {median:,.0f}"
                )
            if worker in slow - self._slow:
                _log.warning("WorkerReport: %s.", message)
        self._slow = slow

    def _hint(self, done: Sequence[Any], seconds: float) -> None:
        mode = self.model.distribute_strategy.mode
        waited = [count.held_up_seconds for count in done]
        worst = max(range(len(done)), key=waited.__getitem__)
        is_alone = waited[worst] > sum(waited) / 2 and waited[worst] > _HOLDS_UP * seconds
        enough = min(count.steps for count in done) >= _ENOUGH_STEPS
        if self._hinted or not is_alone or not enough or getattr(mode, "backup_workers", None) != 0:
            return
        self._hinted = True
        _log.warning(
            "WorkerReport: the others waited for worker %d in %.0f %% of the time. "
            "`Synchronous(backup_workers=1)` goes on without the slowest worker of a round.",
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
    size, unit = unit_of(max(sum(count.bytes_pushed for count in done), sum(count.bytes_pulled for count in done)))

    def row(name: str, counts: Sequence[Any]) -> list[str]:
        of_row = sum(count.steps for count in counts)
        return [
            name,
            f"{of_row:,}",
            f"{sum(count.left_out for count in counts):,}",
            f"{sum(count.samples for count in counts):,}",
            f"{_rate(sum(count.samples for count in counts), seconds):,.0f}",
            f"{100 * _rate(sum(count.seconds for count in counts), seconds * len(counts)):.0f} %",
            f"{sum(count.staleness * count.steps for count in counts) / max(of_row, 1):.2f}",
            f"{max(count.max_staleness for count in counts)}",
            f"{sum(count.bytes_pushed for count in counts) / size:.3f}",
            f"{sum(count.bytes_pulled for count in counts) / size:.3f}",
            f"{sum(count.held_up_seconds for count in counts):.1f}",
        ]

    head = ["worker", "steps", "late", "samples", "samples/s", "at work", "staleness", "max"]
    rows = [head + [f"pushed {unit}", f"pulled {unit}", "held up s"]]
    rows += [row(str(worker), [count]) for worker, count in enumerate(done)]
    return [f"{title} ({steps:,} steps in {seconds:.1f} s):", *aligned([*rows, row("total", done)])]


def _refuse_others(strategy: Any) -> None:
    if not hasattr(strategy, "worker_counts"):
        raise ValueError(
            "WorkerReport tells of workers that push to parameter servers. Received: a model made under "
            f"{described(strategy)}. Expected: `tfdist.strategies.ParameterServerStrategy`. Under other strategies "
            "all workers make the same steps; `tfdist.callbacks.CommunicationReport` tells what they send."
        )
