"""Formulas of failures and of the slowest worker against random runs, which use no formula."""

import math

import numpy as np
import pytest

from tfdist.planning.cost_terms import expected_slowest
from tfdist.planning.simulation import FailureCosts, best_interval_seconds, goodput

SEGMENTS = 4000


def segment_seconds(interval: float, costs: FailureCosts, tasks: int, seed: int) -> np.ndarray:
    """The time to compute and save each of many intervals; a failure of any task loses the interval, and restarts."""
    generator = np.random.default_rng(seed)
    failing = costs.task_mtbf_seconds
    result = np.zeros(SEGMENTS)
    for index in range(SEGMENTS):
        wanted = interval + costs.save_seconds
        while (failure := generator.exponential(failing, tasks).min()) < wanted:
            result[index] += failure
            while (again := generator.exponential(failing, tasks).min()) < costs.restart_seconds:
                result[index] += again
            result[index] += costs.restart_seconds
        result[index] += wanted
    return result


@pytest.mark.parametrize(
    ("interval", "mtbf", "save", "restart", "tasks"),
    [(100.0, 5000.0, 1.0, 10.0, 1), (60.0, 40_000.0, 5.0, 120.0, 64), (300.0, 2e5, 2.0, 60.0, 512)],
)
def test_goodput(interval: float, mtbf: float, save: float, restart: float, tasks: int) -> None:
    costs = FailureCosts(mtbf, save, restart)
    seconds = segment_seconds(interval, costs, tasks, seed=1)
    # Four standard errors of the mean of the simulated times, as a part of that mean.
    tolerance = 4 * seconds.std() / math.sqrt(SEGMENTS) / seconds.mean()
    assert tolerance < 0.1
    assert goodput(interval, costs, tasks) == pytest.approx(interval / seconds.mean(), rel=tolerance)


@pytest.mark.parametrize(("mtbf", "save", "tasks"), [(5000.0, 1.0, 1), (40_000.0, 20.0, 64)])
def test_best_interval_loses_less_than_others(mtbf: float, save: float, tasks: int) -> None:
    costs = FailureCosts(mtbf, save, 30.0)
    best = best_interval_seconds(save, costs.mtbf_seconds(tasks))
    lost = {
        factor: segment_seconds(factor * best, costs, tasks, seed=2).mean() / (factor * best)
        for factor in (0.3, 1.0, 3.0)
    }
    assert lost[1.0] == min(lost.values())


@pytest.mark.parametrize("workers", [2, 8, 64, 1000, 4096])
def test_expected_slowest(workers: int) -> None:
    mean, deviation, rounds = 0.2, 0.03, 1000
    slowest = np.random.default_rng(3).normal(mean, deviation, (rounds, workers)).max(axis=1)
    # Four standard errors, and two per cent of a deviation by which Blom's approximation is off.
    tolerance = 4 * slowest.std() / math.sqrt(rounds) + 0.02 * deviation
    assert expected_slowest(mean, deviation, workers) == pytest.approx(slowest.mean(), abs=tolerance)
