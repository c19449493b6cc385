"""Limits of a loss and a gradient norm."""

import math

import pytest

from tfdist.callbacks.spike_statistics import RunningStatistics, SpikeLimit

LIMIT = SpikeLimit(window=4, warm_up=2, deviations=3.0, factor=2.0)


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ([], math.inf),
        ([1.0], math.inf),
        ([1.0, 1.0], 2.0),  # the factor
        ([1.0, 3.0], 5.0),  # the deviations
        ([-3.0, -1.0], 1.0),
        ([5.0, 5.0, 5.0, 5.0], 10.0),
        ([0.0, 0.0], math.inf),  # a model that has learnt everything
    ],
)
def test_the_limit_is_the_larger_one(values, limit):
    assert LIMIT.of(values) == limit


def test_equal_values_are_no_limit_without_a_factor():
    assert SpikeLimit(window=4, warm_up=2, deviations=3.0, factor=1.0).of([5.0, 5.0]) == math.inf


def test_only_values_that_were_added_in_the_window_count():
    statistics = RunningStatistics(LIMIT)
    for value in (1000.0, 1.0, 1.0, 1.0, 1.0):
        statistics.add({"loss": value})
    assert statistics.spike_in({"loss": 2.0}) is None
    assert statistics.spike_in({"loss": 2.5}) == ("loss", 2.5, 2.0)
    assert statistics.spike_in({"loss": 2.5}) == ("loss", 2.5, 2.0), "what has jumped was added"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_jumps_also_during_the_warm_up(value):
    name, found, limit = RunningStatistics(LIMIT).spike_in({"loss": 1.0, "gradient norm": value})
    assert name == "gradient norm" and limit == math.inf
    assert found == value or math.isnan(value)


def test_statistics_continue_where_they_were():
    first, second = RunningStatistics(LIMIT), RunningStatistics(LIMIT)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        first.add({"loss": value})
    second.restore(first.state())
    assert second.state() == {"loss": [2.0, 3.0, 4.0, 5.0]}
    second.add({"loss": 6.0})
    assert second.state() == {"loss": [3.0, 4.0, 5.0, 6.0]}
