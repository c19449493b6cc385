"""RestartCount: restarts by the launcher, by hand, and within one process."""

import pytest

from tfdist.callbacks import restart_count
from tfdist.callbacks.restart_count import RestartCount


@pytest.fixture
def process(monkeypatch):
    """`process(run, attempt)`: makes this process look like another one."""

    def become(run=None, attempt=None):
        for name, value in (("TFDIST_RUN_ID", run), ("TFDIST_ATTEMPT", attempt)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))
        restart_count.run_id.cache_clear()

    yield become
    restart_count.run_id.cache_clear()


def resumed(state):
    count = RestartCount()
    count.resume(state)
    return count


def test_attempts_of_the_launcher_count_though_they_save_nothing(process):
    process("a", 0)
    state = RestartCount().state()
    for attempt in (1, 2):
        process("a", attempt)
        assert RestartCount().number == resumed(state).number == attempt
    state = resumed(state).state()
    process("a", 3)
    assert resumed(state).number == 3


def test_a_run_that_goes_on_from_another_ones_checkpoint_is_a_restart(process):
    process("a", 2)
    state = RestartCount().state()
    process("b", 0)
    assert resumed(state).number == 3
    process("b", 1)
    assert resumed(state).number == 4
    assert resumed(resumed(state).state()).number == 4


def test_without_a_launcher_each_process_counts_and_no_second_fit(process):
    process()
    first = RestartCount()
    assert first.number == resumed(first.state()).number == 0
    state = first.state()
    process()
    second = resumed(state)
    assert second.number == 1
    second.resume(state)
    assert second.number == 1, "told twice"
    state = second.state()
    process()
    assert resumed(state).number == 2
