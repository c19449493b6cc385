"""Checkpoints are due at the same steps on all workers, whatever their clocks say."""

import types

import pytest

from tfdist.recovery import schedule
from tfdist.recovery.schedule import Interval, Schedule


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless its `now` is set."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(schedule, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def due_steps(schedule, steps):
    return [step for step in steps if schedule.is_due(step)]


def test_steps(agreements):
    (alone,) = agreements(1)
    assert due_steps(Schedule(Interval(steps=3), alone, 0), range(1, 8)) == [3, 6]
    assert due_steps(Schedule(Interval(steps=3), alone, 4), range(5, 8)) == [6], "after a restart at the same steps"
    assert due_steps(Schedule(Interval(steps=3), alone, 0), [2, 4, 6, 8, 9, 14]) == [4, 6, 9, 14], "several at once"
    assert due_steps(Schedule(Interval(epochs=1), alone, 0), range(1, 8)) == []


def test_epochs(agreements):
    (alone,) = agreements(1)
    for every, due in ((1, [0, 1, 2, 3, 4]), (2, [1, 3]), (None, [])):
        asked = Schedule(Interval(epochs=every, steps=1), alone, 0)
        assert [epoch for epoch in range(5) if asked.is_due_after_epoch(epoch)] == due


def test_seconds_are_those_since_the_last_save(agreements, clock):
    (alone,) = agreements(1)
    asked = Schedule(Interval(seconds=10), alone, 0)

    def due(steps, every=1.0):
        found = []
        for step in steps:
            clock.now = 100.0 + step * every
            if asked.is_due(step):
                found.append(step)
                asked.saved()
        return found

    assert due(range(1, 15)) == [10]
    asked.saved()  # for another reason, as a signal, at 14
    assert due(range(15, 36)) == [24, 34]


def test_the_chiefs_clock_decides_for_all(agreements, clock, told):
    ranks = agreements(2)
    schedules = [Schedule(Interval(seconds=10), agreement, 0) for agreement in ranks]
    due = [[], []]
    for step in range(1, 60):
        for rank, rate in ((0, 1.0), (1, 100.0)):  # the other's clock says a hundred times as much
            clock.now = 100.0 + rate * step
            if schedules[rank].is_due(step):
                due[rank].append(step)
                schedules[rank].saved()
    assert due == [[10, 20, 30, 40, 50]] * 2
    assert len(told.values) < 40, "it says so at some steps only"


def test_steps_that_become_slower_are_asked_at_again(agreements, clock, told):
    chief, _ = agreements(2)
    asked = Schedule(Interval(seconds=3600), chief, 0)
    for step in range(1, 3001):
        clock.now += 1e-6
        assert not asked.is_due(step)
    assert len(told.values) == 3, "after 1000 steps at most"
