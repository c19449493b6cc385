"""How long a step takes and what it sends, compared with what `tfdist plan` has predicted."""

import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from tfdist.collectives import CommunicationStats
from tfdist.training.strategy_protocol import training_strategy
from tfdist.utils.formatting import format_bytes, format_seconds

_WARM_UP_EXECUTIONS = 3  # of the step function: tracing, the first use of buffers, and threads that start
_MIN_STEPS = 3
_REORDERED = 64  # more than the threads in which Keras calls callbacks


@dataclass(frozen=True)
class PlanComparison:
    """A plan's prediction, and what was measured.

    >>> print(PlanComparison(0.12, 0.1308, 1_230_000, 1_230_000.0))
    Step: planned 120 ms, measured 131 ms (+9 %). Bytes sent in a step: planned 1.2 MB, measured 1.2 MB.
    >>> print(PlanComparison(0.12, None, 0, 0.0))
    Step: planned 120 ms, not measured: the training was too short. Bytes sent in a step: planned 0 B, measured 0 B.

    Attributes:
        planned_step_seconds: Predicted mean time of a training step.
        measured_step_seconds: Measured mean time. None: there were too few steps after the first ones.
        planned_wire_bytes: Predicted bytes that a worker sends in a step.
        measured_wire_bytes: Counted bytes of gradients, and of activations between stages; None without a step.
    """

    planned_step_seconds: float
    measured_step_seconds: float | None
    planned_wire_bytes: int
    measured_wire_bytes: float | None

    def __str__(self) -> str:
        planned, measured = self.planned_step_seconds, self.measured_step_seconds
        if measured is None:
            step = "not measured: the training was too short"
        else:
            step = f"measured {format_seconds(measured)} ({100 * (measured / planned - 1):+.0f} %)"
        sent = "none" if self.measured_wire_bytes is None else format_bytes(self.measured_wire_bytes)
        return (
            f"Step: planned {format_seconds(planned)}, {step}. Bytes sent in a step: planned "
            f"{format_bytes(self.planned_wire_bytes)}, measured {sent}."
        )


class StepMeter:
    """Measures the training steps of a process from the beginning of one to the beginning of the next.

    So the time includes the data and what other callbacks do after a step; evaluation and other work between epochs do
    not count, nor do the last execution of an epoch and the first one, which waits for workers that are still busy
    between epochs. The first steps are left out, and the complete first epoch if others follow, because it may trace
    the step for batches of another size.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self._plan = strategy, strategy.plan
        self._sent_before = _bytes_sent(strategy)
        self._executions = self._of_epoch = self._epochs = self._steps = 0  # `_steps`: of finished epochs
        self._began: tuple[int, float] | None = None  # the last execution: its first step, and when
        self._first = 0  # step of the epoch
        self._ended: deque[int] = deque(maxlen=_REORDERED)
        self._counted = [_Counted(), _Counted()]  # in the first epoch, and later

    @classmethod
    def of(cls, strategy: Any) -> "StepMeter | None":
        """Returns a meter, or None if the strategy has no plan whose prediction applies."""
        return cls(strategy) if _has_prediction(strategy) else None

    def begin_steps(self, step: int) -> None:
        """Call this when the step function begins with `step`, counted in the epoch."""
        now = time.perf_counter()
        if self._began is None:
            self._first, self._of_epoch = step, 0
        else:
            self._executions += 1
            self._of_epoch += 1
            if self._executions > _WARM_UP_EXECUTIONS and self._of_epoch > 1:
                self._counted[min(self._epochs, 1)].add(step - self._began[0], now - self._began[1])
        self._began = step, now

    def end_steps(self, step: int) -> None:
        """Call this after `step`, counted in the epoch; Keras may do so in other threads, and later."""
        self._ended.append(step)

    def end_epoch(self) -> None:
        """Excludes the time until the first step of the next epoch."""
        self._steps = self._all_steps()
        self._epochs += 1
        self._began = None
        self._ended.clear()

    def comparison(self) -> PlanComparison:
        """Compares the steps so far with the plan."""
        first, later = self._counted
        used = later if later.steps >= _MIN_STEPS else first
        seconds = used.seconds / used.steps if used.steps >= _MIN_STEPS else None
        sent, steps = _bytes_sent(self._strategy), self._all_steps()
        sent.subtract(self._sent_before)
        nbytes = max(sent.values(), default=0) / steps if steps else None
        return PlanComparison(self._plan.step_seconds, seconds, self._plan.wire_bytes, nbytes)

    def _all_steps(self) -> int:
        return self._steps + (max(self._ended) + 1 - self._first if self._ended else 0)


class RoundMeter:
    """Measures the steps of workers that push to parameter servers, by epochs: they end at different times.

    The first epoch is left out: workers trace their functions in it.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy, self._plan = strategy, strategy.plan
        self._before: CommunicationStats | None = None
        self._seconds, self._done = 0.0, CommunicationStats()

    @classmethod
    def of(cls, strategy: Any) -> "RoundMeter | None":
        """Returns a meter, or None if the strategy has no plan whose prediction applies."""
        has_servers = bool(training_strategy(strategy).worker_stats)
        return cls(strategy) if has_servers and _has_prediction(strategy) else None

    def end_epoch(self, seconds: float) -> None:
        """Counts an epoch whose training steps took `seconds`."""
        now = self._strategy.communication
        if self._before is not None:
            self._done += now - self._before
            self._seconds += seconds
        self._before = now

    def comparison(self) -> PlanComparison:
        """Compares the epochs so far with the plan. A step is a batch of `fit`; each worker pushes a part of it."""
        steps = self._done.updates * self._strategy.gradient_accumulation_steps
        seconds = self._seconds / steps if steps >= _MIN_STEPS else None
        sent = self._done.wire_bytes / steps / self._strategy.num_workers if steps else None
        return PlanComparison(self._plan.step_seconds, seconds, self._plan.wire_bytes, sent)


@dataclass
class _Counted:
    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps += steps
        self.seconds += seconds


def _has_prediction(strategy: Any) -> bool:
    plan = training_strategy(strategy).plan
    return plan is not None and not math.isnan(plan.step_seconds)


def _bytes_sent(strategy: Any) -> "Counter[str]":
    """Returns what each worker, or device of this process, has sent in training steps; a chief is left out."""
    links = strategy.communication_by_link("train_step")
    if links is None:
        return Counter({"": strategy.communication.wire_bytes})
    sent: Counter[str] = Counter()
    for (sender, _), stats in links.items():
        task, _, _ = sender.rpartition("/device:")
        if not sender.startswith("/job:chief"):
            sent[task if sender.startswith("/job:worker") else sender] += stats.total_bytes
    return sent
