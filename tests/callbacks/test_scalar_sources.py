"""What TrainingMonitor writes beside the logs: times of steps, stalls of saves, restarts."""

from types import SimpleNamespace

import pytest

from tfdist.callbacks import training_monitor
from tfdist.callbacks.training_monitor import RestartCount, SaveStalls, StepTimes


def test_step_times_leave_out_the_step_that_is_traced(clock):
    times = StepTimes()

    def execute(seconds, count):
        times.begin()
        clock.now += seconds
        times.end(count)
        clock.now += 100.0  # callbacks and validation

    execute(30.0, 1)
    assert times.seconds == 30.0 and times.scalars() == {}
    execute(1.0, 1)
    execute(3.0, 4)
    assert times.seconds == 4.0
    assert times.scalars() == {"step_ms": 800.0}
    assert times.seconds == 0.0 and times.scalars() == {}


def test_stalls_are_those_of_the_saves_since_the_last_point():
    recovery = SimpleNamespace(saves=2, stall_seconds=9.0)
    stalls = SaveStalls(recovery)
    assert stalls.scalars() == {}
    recovery.saves, recovery.stall_seconds = 4, 9.5
    assert stalls.scalars() == {"checkpoint_stall_ms": 250.0}
    assert stalls.scalars() == {}
    assert SaveStalls(None).scalars() == {}


@pytest.fixture
def process(monkeypatch):
    """`process(run, attempt)` makes this process look like another one."""

    def become(run=None, attempt=None):
        for name, value in (("TFDIST_RUN_ID", run), ("TFDIST_ATTEMPT", attempt)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))
        training_monitor.run_id.cache_clear()

    yield become
    training_monitor.run_id.cache_clear()


def resumed(state):
    count = RestartCount()
    count.resume(state)
    return count


def test_attempts_of_the_launcher_count_without_a_checkpoint(process):
    process("a", 0)
    state = RestartCount().state()
    for attempt in (1, 2):
        process("a", attempt)
        assert RestartCount().number == resumed(state).number == attempt
    state = resumed(state).state()
    process("a", 3)
    assert resumed(state).number == 3


def test_run_that_resumes_another_runs_checkpoint_is_a_restart(process):
    process("a", 2)
    state = RestartCount().state()
    process("b", 0)
    assert resumed(state).number == 3
    process("b", 1)
    assert resumed(state).number == 4
    assert resumed(resumed(state).state()).number == 4


def test_without_a_launcher_processes_count_and_second_fits_do_not(process):
    process()
    first = RestartCount()
    assert first.number == resumed(first.state()).number == 0
    state = first.state()
    process()
    second = resumed(state)
    assert second.number == 1
    second.resume(state)
    assert second.number == 1, "the same state twice"
    state = second.state()
    process()
    assert resumed(state).number == 2
