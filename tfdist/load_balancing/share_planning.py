"""Plans the workers' shares of a batch from their measured seconds per row, as `LoadBalancing` says.

They are pure functions of NumPy arrays. Every worker calls them with the same bits and must come to the same bits: sums
are written as loops, because the order in which NumPy adds depends on the CPU.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.utils.argument_checks import is_number, is_whole_number

# The rows of the state, a float64 array of shape [STATE_ROWS, workers]. The first is what `row_bounds` divides by; the
# others are measurements: since the rows were divided last, and since the strategy was created.
SHARE = 0  # 0 if the worker is lost; once rows have been divided, the worker's rows of the largest batch
SECONDS_PER_ROW = 1  # smoothed; 0 if unknown
IGNORED = 2  # how many of the next measurements are not used; equal for all workers, as the numbers of steps are
BATCH_ROWS = 3  # rows of the largest batch since the last division; equal for all workers
SINCE_STEPS, SINCE_ROWS, SINCE_SECONDS = 4, 5, 6
STEPS, ROWS, SECONDS, WAITED_SECONDS = 7, 8, 9, 10
# These and all later rows, except shares and processes, are equal for all workers. An interval is the seconds between
# two steps.
SINCE_INTERVALS, SINCE_SQUARES = 11, 12  # the sum of the intervals and that of their squares
# The shares with the shortest interval so far, its mean, and the variance of that mean; 0 if unknown.
FASTEST_SHARE, FASTEST_INTERVAL, FASTEST_VARIANCE = 13, 14, 15
HELD, HOLD = 16, 17  # how many more times rows are not divided, and how many the last refutation has cost
# Where workers may be lost: which process of a rank computes, counted from 1, 0 if none; and the shares that the last
# division has given to workers that still compute, 0 for others.
PROCESS, PLANNED_SHARE = 18, 19
STATE_ROWS = 20

_SINCE = SINCE_STEPS, SINCE_ROWS, SINCE_SECONDS, BATCH_ROWS, SINCE_INTERVALS, SINCE_SQUARES
# A division must be predicted to shorten steps by this factor: otherwise noise moves rows to and fro.
_LEAST_GAIN = 1.03
# Rows are moved in units, so that there are few sizes (each costs XLA a compilation, oneDNN a search for a kernel).
_UNITS = 64
# The first step on new sizes compiles and allocates, and is reported one step later.
_IGNORED_STEPS = 2
# A single stall (a save, the collector of garbage) must not count as the speed of a worker.
_LONGEST_STEP = 8.0
# New shares are refuted if their steps are longer than before by this number of standard errors.
_REFUTING_ERRORS = 3.0
_LONGEST_HOLD = 64


@dataclasses.dataclass(frozen=True)
class LoadBalancing:
    """Divides the rows of every global batch by the measured speeds of the workers.

    >>> LoadBalancing(every_steps=50, max_share=0.75).limits(2)
    (0.75, 0.75)

    Attributes:
        every_steps: The number of training steps (micro-steps, with accumulation) after which the rows are divided
            again. They stay as they are if that would save less than 3 % of a step.
        smoothing: The weight of earlier measurements in a worker's seconds per row, from 0 to less than 1.
        max_share: The largest part of a batch that a worker gets, as a fraction, because of its memory. A sequence has
            one number for each worker, by rank.
    """

    every_steps: int = 20
    smoothing: float = 0.5
    max_share: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        if not is_whole_number(self.every_steps, at_least=1):
            raise ValueError(
                f"Invalid `every_steps` of a LoadBalancing. Received: {self.every_steps!r}. Expected: a whole number "
                "of at least 1, the number of training steps between two divisions, such as 20."
            )
        if not is_number(self.smoothing, at_least=0) or self.smoothing >= 1:
            raise ValueError(
                f"Invalid `smoothing` of a LoadBalancing. Received: {self.smoothing!r}. Expected: a number from 0 (the "
                "last measurement alone counts) to less than 1, such as 0.5."
            )
        limits = self.max_share if isinstance(self.max_share, Sequence) else [self.max_share]
        if not limits or not all(is_number(limit, at_least=0) and 0 < limit <= 1 for limit in limits):
            raise ValueError(
                f"Invalid `max_share` of a LoadBalancing. Received: {self.max_share!r}. Expected: a fraction above 0 "
                "and at most 1, such as 0.75, or one for each worker, as (0.75, 0.5)."
            )

    def limits(self, workers: int) -> tuple[float, ...]:
        """Returns the largest share of each of `workers` workers.

        Raises:
            ValueError: The number of workers is another one, or the shares cannot add up to a batch.
        """
        limits = tuple(self.max_share) if isinstance(self.max_share, Sequence) else (self.max_share,) * workers
        if len(limits) != workers or sum(limits) < 1:
            raise ValueError(
                f"The largest shares do not fit the workers. Received: max_share={self.max_share!r} with {workers} "
                "workers. Expected: one number, or one for each worker, whose sum over all workers is at least 1. "
                "Raise `max_share`."
            )
        return tuple(float(limit) for limit in limits)


def load_balancing_of(value: Any) -> LoadBalancing | None:
    """Returns the options that a strategy's `load_balancing` stands for, or `None` if shares do not follow speeds.

    >>> load_balancing_of(True), load_balancing_of(False)
    (LoadBalancing(every_steps=20, smoothing=0.5, max_share=1.0), None)
    """
    if isinstance(value, LoadBalancing):
        return value
    if isinstance(value, bool):
        return LoadBalancing() if value else None
    raise ValueError(
        f"Invalid `load_balancing`. Received: {value!r}. Expected: True, False or a "
        "tfdist.strategies.LoadBalancing(...)."
    )


def checked_shares(shares: Any, workers: int) -> tuple[float, ...] | None:
    """Returns a strategy's `shares` as positive numbers, one for each worker, or `None` if it has none.

    >>> checked_shares([1, 3], 2)
    (1.0, 3.0)
    """
    if shares is None:
        return None
    values = list(shares) if isinstance(shares, Sequence) and not isinstance(shares, str) else []
    if len(values) != workers or not all(is_number(share, at_least=0) and share > 0 for share in values):
        raise ValueError(
            f"Invalid `shares`. Received: shares={shares!r} with {workers} workers. Expected: one positive number for "
            "each worker, by rank, such as [1, 3]: the second worker computes three times as many rows as the first."
        )
    return tuple(float(share) for share in values)


def initial_state(shares: Sequence[float]) -> np.ndarray:
    """Returns the state in which nothing has been measured.

    >>> initial_state([1, 3])[SHARE].tolist()
    [1.0, 3.0]
    """
    state = np.zeros([STATE_ROWS, len(shares)])
    state[SHARE] = shares
    state[IGNORED] = _IGNORED_STEPS
    return state


def after_step(
    state: np.ndarray,
    seconds: np.ndarray,
    rows: np.ndarray,
    interval: float,
    devices: Sequence[int],
    options: LoadBalancing | None,
    *,
    units: int = _UNITS,
) -> np.ndarray:
    """Returns the state after one more measured step.

    Args:
        state: The state before.
        seconds: How long each worker computed, float64 of shape [workers]; 0 if it was not measured.
        rows: How many rows it computed on, float64 of shape [workers].
        interval: The seconds from the start of this step to that of the next one; 0 if they are unknown.
        devices: See `plan_rows`.
        options: When and how to divide rows again; `None` if the shares are fixed.
        units: See `plan_rows`.
    """
    state = state.copy()
    if not np.all(seconds[rows > 0] > 0) or not np.any(rows > 0):
        return state
    if 0 < interval < np.max(seconds):  # A wrong measurement: no worker computes longer than the step takes.
        return state
    state[STEPS] += 1
    state[ROWS] += rows
    state[SECONDS] += seconds
    state[WAITED_SECONDS] += np.where(state[SHARE] > 0, np.max(seconds) - seconds, 0.0)
    if options is None:
        return state
    if state[IGNORED, 0] > 0:
        state[IGNORED] -= 1
        return state
    known = state[SECONDS_PER_ROW] > 0
    longest = np.where(known, _LONGEST_STEP * state[SECONDS_PER_ROW] * rows, np.inf)
    state[SINCE_STEPS] += 1
    state[SINCE_ROWS] += rows
    state[SINCE_SECONDS] += np.minimum(seconds, longest)
    state[SINCE_INTERVALS] += interval
    state[SINCE_SQUARES] += interval * interval
    state[BATCH_ROWS] = np.maximum(state[BATCH_ROWS], _total(rows))
    return _divided_again(state, devices, options, units) if state[SINCE_STEPS, 0] >= options.every_steps else state


def among(
    state: np.ndarray, processes: np.ndarray, first_shares: Sequence[float], options: LoadBalancing | None
) -> np.ndarray:
    """Returns the state in which certain processes of the workers compute; the same one if they did so before.

    Workers that stay keep their speeds and the proportions of their shares; a joiner has the mean of their shares until
    its speed is measured. The result depends on the last step and on who computes now, but not on changes in between: a
    worker that repeats the steps of others sees only who has computed each of them.

    >>> state = among(initial_state([1, 1, 1]), np.array([1, 1, 0]), [1, 1, 1], None)
    >>> state[SHARE].tolist(), among(state, np.array([0, 1, 2]), [1, 1, 1], None)[SHARE].tolist()
    ([1.0, 1.0, 0.0], [0.0, 1.0, 1.0])

    Args:
        state: The state before.
        processes: Which process of each rank computes, counted from 1; 0 if none. Of shape [workers].
        first_shares: The shares of workers of which no speed is known.
        options: Their `max_share` is kept, unless the workers that are left could not compute a batch then.
    """
    if np.array_equal(state[PROCESS], processes):
        return state
    state = state.copy()
    for row in (SECONDS_PER_ROW, PLANNED_SHARE):
        state[row, state[PROCESS] != processes] = 0.0
    state[PROCESS] = processes
    for row in (*_SINCE, FASTEST_INTERVAL, FASTEST_VARIANCE, HELD, HOLD):
        state[row] = 0.0
    state[IGNORED] = _IGNORED_STEPS
    living = [worker for worker, process in enumerate(processes) if process > 0]
    planned = state[PLANNED_SHARE, living].tolist()
    known = [share for share in planned if share > 0]
    mean = _total(known) / len(known) if known else 0.0
    shares = [share or mean or first_shares[worker] for worker, share in zip(living, planned, strict=True)]
    if options is not None:
        limits = options.limits(len(processes))
        shares = within_limits(shares, [limits[worker] for worker in living])
    state[SHARE] = 0.0
    state[SHARE, living] = whole_shares(shares)
    return state


def _divided_again(state: np.ndarray, devices: Sequence[int], options: LoadBalancing, units: int) -> np.ndarray:
    """Updates the seconds per row, divides the rows by them if that saves time, and begins to measure from zero."""
    workers = [worker for worker, share in enumerate(state[SHARE]) if share > 0]
    for worker in workers:
        if state[SINCE_ROWS, worker] > 0:
            measured = state[SINCE_SECONDS, worker] / state[SINCE_ROWS, worker]
            before = state[SECONDS_PER_ROW, worker] or measured
            state[SECONDS_PER_ROW, worker] = options.smoothing * before + (1.0 - options.smoothing) * measured
    batch, is_idle = int(state[BATCH_ROWS, 0]), bool(np.any(state[SINCE_ROWS, workers] == 0))
    slowest = float(np.max(state[SECONDS_PER_ROW]))
    # A worker that had no rows counts as the slowest one until it is measured.
    costs = [cost or slowest for cost in state[SECONDS_PER_ROW, workers].tolist()]
    may_move = _checked_by_intervals(state)
    for row in _SINCE:
        state[row] = 0.0
    limits = options.limits(state.shape[1])
    bounds = [devices[worker] for worker in workers], [limits[worker] for worker in workers]
    planned = plan_rows(batch, costs, *bounds, units) if may_move else None
    if planned is None:
        return state
    present = [share * batch / _total(state[SHARE]) for share in state[SHARE, workers].tolist()]
    if is_idle or _step_seconds(present, costs) > _LEAST_GAIN * _step_seconds(planned, costs):
        state[SHARE, workers] = planned
        state[PLANNED_SHARE] = state[SHARE]
        state[IGNORED] = _IGNORED_STEPS
    return state


def _checked_by_intervals(state: np.ndarray) -> bool:
    """Returns whether rows may move, and takes the present shares back if they have made steps longer.

    A worker's seconds are what it says of itself. The interval from one step to the next contains the computation of
    all workers, exchanges and waits, so it shows whether the shares that follow from these seconds are right. Shares
    with longer intervals than the fastest ones so far are replaced by these, and rows stay for a while, each time for
    twice as long. A few long intervals, as of a validation between two steps, raise the standard error as much as the
    mean, so they refute nothing.
    """
    steps = float(state[SINCE_STEPS, 0])
    mean = float(state[SINCE_INTERVALS, 0]) / steps
    if mean <= 0 or steps < 2:
        return True
    variance = max(float(state[SINCE_SQUARES, 0]) / steps - mean * mean, 0.0) / (steps - 1)
    fastest = float(state[FASTEST_INTERVAL, 0])
    error = math.sqrt(variance + float(state[FASTEST_VARIANCE, 0]))
    is_other = fastest > 0 and bool(np.any(state[SHARE] != state[FASTEST_SHARE]))
    if is_other and mean > fastest + _REFUTING_ERRORS * error:
        state[SHARE] = state[PLANNED_SHARE] = state[FASTEST_SHARE]
        state[IGNORED] = _IGNORED_STEPS
        state[HOLD] = min(max(2.0 * float(state[HOLD, 0]), 1.0), _LONGEST_HOLD)
        state[HELD] = state[HOLD]
        return False
    if is_other and mean < fastest - _REFUTING_ERRORS * error:
        state[HOLD] = 0.0
    if not is_other or mean < fastest:
        state[FASTEST_SHARE], state[FASTEST_INTERVAL], state[FASTEST_VARIANCE] = state[SHARE], mean, variance
    if state[HELD, 0] > 0:
        state[HELD] -= 1
        return False
    return True


def plan_rows(
    batch: int, costs: Sequence[float], devices: Sequence[int], limits: Sequence[float], units: int = _UNITS
) -> list[int] | None:
    """Divides the rows of a batch such that all workers need the same time, as far as the bounds allow.

    Each device of a worker gets at least a row, and each worker at least a unit, so that a worker that becomes faster
    is noticed.

    >>> plan_rows(128, [1.0, 3.0], [1, 1], [1.0, 1.0]), plan_rows(128, [1.0, 3.0], [1, 1], [0.6, 1.0])
    ([96, 32], [76, 52])

    `costs` are the workers' seconds per row, all positive, `devices` their numbers of devices, `limits` their largest
    shares, as fractions. `units` is the least number of units into which the batch is divided; there are more for many
    workers. `None` stands for too few rows to divide.
    """
    workers = range(len(costs))
    unit = max(1, batch // max(units, units // 4 * len(costs)))
    least = [-(-max(unit, number) // unit) for number in devices]
    most = [max(int(limit * batch) // unit, low) for limit, low in zip(limits, least, strict=True)]
    total = batch // unit
    if sum(least) > total:
        return None
    wanted = _bounded([1.0 / cost for cost in costs], float(total), least, most)
    units_of_workers = [min(max(int(wanted[worker]), least[worker]), most[worker]) for worker in workers]
    while sum(units_of_workers) != total:
        step = 1 if sum(units_of_workers) < total else -1
        # Limits are rounded down to units, so together they may be less than the batch: then they are exceeded.
        can = [
            w for w in workers if (units_of_workers[w] < most[w] if step > 0 else units_of_workers[w] > least[w])
        ] or list(workers)
        # The unit goes where it delays the least, or leaves where it saves the most.
        worker = min(can, key=lambda w: (units_of_workers[w] + step) * costs[w] * step)
        units_of_workers[worker] += step
    rows = [number * unit for number in units_of_workers]
    # Rows that do not fill a unit go to one worker.
    roomy = [w for w in workers if rows[w] + batch - total * unit <= limits[w] * batch] or list(workers)
    rows[min(roomy, key=lambda w: (rows[w] * costs[w], w))] += batch - total * unit
    return rows


def row_bounds(shares: Sequence[int], rows: int) -> list[int]:
    """Returns where each worker's rows begin, and the end of the last.

    >>> row_bounds([1, 3], 8), row_bounds([1, 3], 5), row_bounds([1, 3], 1)
    ([0, 2, 8], [0, 1, 5], [0, 0, 1])
    """
    total, ends = int(_total(shares)), [0]
    for share in shares:
        ends.append(ends[-1] + int(share))
    return [(end * rows + total // 2) // total for end in ends]


def within_limits(shares: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Returns the first shares within their limits; what a limit cuts off goes to the other workers.

    >>> within_limits([1, 1], [1.0, 0.25]), within_limits([1, 3], [1.0, 1.0])
    ([1.5, 0.5], [1, 3])
    """
    total = _total(shares)
    most = [limit * total for limit in limits]
    if all(share <= bound for share, bound in zip(shares, most, strict=True)):
        return list(shares)
    return _bounded(shares, total, [0.0] * len(shares), most)


def whole_shares(shares: Sequence[float]) -> list[int]:
    """Returns integers in the proportions of `shares`, to a millionth; integers stay as they are.

    >>> whole_shares([1.0, 3.0]), whole_shares([0.25, 0.75])
    ([1, 3], [333333, 1000000])
    """
    if all(float(share).is_integer() for share in shares):
        return [int(share) for share in shares]
    return [max(1, round(1e6 * share / max(shares))) for share in shares]


def _bounded(weights: Sequence[float], total: float, least: Sequence[float], most: Sequence[float]) -> list[float]:
    """Divides `total` in proportion to `weights`, within bounds."""
    fixed: dict[int, float] = {}
    while True:
        free = [worker for worker in range(len(weights)) if worker not in fixed]
        weight = _total([weights[worker] for worker in free])
        remaining = total - _total(list(fixed.values()))
        parts = {worker: remaining * weights[worker] / weight for worker in free}
        high = {worker: float(most[worker]) for worker in free if parts[worker] > most[worker]}
        low = {worker: float(least[worker]) for worker in free if parts[worker] < least[worker]}
        # Those whose bounds bind more are fixed first; the others may then have room.
        too_much = _total([parts[worker] - bound for worker, bound in high.items()])
        too_little = _total([bound - parts[worker] for worker, bound in low.items()])
        binding = high if too_much >= too_little else low
        if not binding:
            return [fixed.get(worker, parts.get(worker, 0.0)) for worker in range(len(weights))]
        fixed.update(binding)
        if len(fixed) == len(weights):
            return [fixed[worker] for worker in range(len(weights))]


def _step_seconds(rows: Sequence[float], costs: Sequence[float]) -> float:
    return max(number * cost for number, cost in zip(rows, costs, strict=True))


def _total(values: Sequence[float] | np.ndarray) -> float:
    total = 0.0
    for value in values:
        total += float(value)
    return total
