"""Checkpoints are due at the same steps on all workers, whatever their clocks say."""

import json
import re

import pytest

from tfdist.recovery.save_schedule import SaveInterval, SaveSchedule


def due_steps(schedule, steps):
    return [step for step in steps if schedule.is_due(step)]


def test_steps(coordinations):
    (alone,) = coordinations(1)
    assert due_steps(SaveSchedule(SaveInterval(steps=3), alone, 0), range(1, 8)) == [3, 6]
    assert due_steps(SaveSchedule(SaveInterval(steps=3), alone, 4), range(5, 8)) == [6], (
        "after a restart at the same steps"
    )
    assert due_steps(SaveSchedule(SaveInterval(steps=3), alone, 0), [2, 4, 6, 8, 9, 14]) == [4, 6, 9, 14], (
        "several at once"
    )
    assert due_steps(SaveSchedule(SaveInterval(epochs=1), alone, 0), range(1, 8)) == []


def test_epochs(coordinations):
    (alone,) = coordinations(1)
    assert SaveInterval() == SaveInterval(epochs=1)
    for every, due in ((1, [0, 1, 2, 3, 4]), (2, [1, 3]), (None, [])):
        schedule = SaveSchedule(SaveInterval(epochs=every, steps=1), alone, 0)
        assert [epoch for epoch in range(5) if schedule.is_due_after_epoch(epoch)] == due


def test_seconds_are_those_since_the_last_save(coordinations, clock):
    (alone,) = coordinations(1)
    schedule = SaveSchedule(SaveInterval(seconds=10), alone, 0)

    def due(steps, every=1.0):
        found = []
        for step in steps:
            clock.now = 100.0 + step * every
            if schedule.is_due(step):
                found.append(step)
                schedule.saved()
        return found

    assert due(range(1, 15)) == [10]
    schedule.saved()  # for another reason, as a signal, at 14
    assert due(range(15, 36)) == [24, 34]


def test_the_chiefs_clock_decides_for_all(coordinations, clock, key_values):
    ranks = coordinations(2)
    schedules = [SaveSchedule(SaveInterval(seconds=10), coordination, 0) for coordination in ranks]
    due = [[], []]
    for step in range(1, 60):
        for rank, rate in ((0, 1.0), (1, 100.0)):  # the other's clock says a hundred times as much
            clock.now = 100.0 + rate * step
            if schedules[rank].is_due(step):
                due[rank].append(step)
                schedules[rank].saved()
    assert due == [[10, 20, 30, 40, 50]] * 2
    assert len(key_values.values) < 40, "it decides at some steps only"


def test_the_chief_decides_again_after_1000_steps(coordinations, clock, key_values):
    chief, _ = coordinations(2)
    schedule = SaveSchedule(SaveInterval(seconds=3600), chief, 0)
    for step in range(1, 3001):
        clock.now += 1e-6
        assert not schedule.is_due(step)
    assert len(key_values.values) == 3, "after 1000 steps at most"


@pytest.mark.parametrize("value", [0, -1, 2.5, 2.0, True, float("nan"), "3"])
@pytest.mark.parametrize("name", ["steps", "epochs"])
def test_invalid_counts(name, value):
    message = f"Invalid `every_{name}`. Received: every_{name}={value!r}. Expected: a whole number of at least 1."
    with pytest.raises(ValueError, match=re.escape(message)):
        SaveInterval(**{name: value})


@pytest.mark.parametrize("value", [0, -1.5, True, float("nan"), float("inf"), "3"])
def test_invalid_seconds(value):
    message = (
        f"Invalid `every_seconds`. Received: every_seconds={value!r}. Expected: a finite number of seconds above 0"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        SaveInterval(seconds=value)


def test_a_worker_that_joins_continues_like_the_one_whose_state_it_has(coordinations, clock):
    (alone,) = coordinations(1)
    interval = SaveInterval(steps=20, seconds=4)
    first, joined = SaveSchedule(interval, alone, 0), SaveSchedule(interval, alone, 0)
    due = {first: [], joined: []}
    for step in range(1, 60):
        clock.now = 100.0 + step
        for schedule in (first, joined) if step > 33 else (first,):
            if schedule.is_due(step):
                due[schedule].append(step)
                schedule.saved()
        if step == 33:
            joined.resume(json.loads(json.dumps(first.state())))
    assert due[joined] == [step for step in due[first] if step > 33] and len(due[joined]) > 4
