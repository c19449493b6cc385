"""When workers beside parameter servers are started again."""

from tfdist.launch.failure import WorkerEnd
from tfdist.launch.liveness import Liveness
from tfdist.launch.outcome import Outcome
from tfdist.launch.replacements import Replacements
from tfdist.launch.restarts import Restarts
from tfdist.launch.roles import with_parameter_servers

ROLES = dict(enumerate(with_parameter_servers(2, 1)))


def delays(replacements, *lives, rank=1):
    """The time until each start, given how long the worker lived before."""
    now, found = 0.0, []
    replacements.note_start(rank, now=now)
    for life in lives:
        now += life
        replacements.after_end(rank, now=now)
        before = now
        while not replacements.due(now=now):
            now += 0.25
        found.append(now - before)
        replacements.note_start(rank, now=now)
    return found


def test_time_doubles_up_to_half_a_minute():
    assert delays(Replacements([1], limit=None), *[5.0] * 7) == [1, 2, 4, 8, 16, 30, 30]


def test_long_life_begins_anew():
    assert delays(Replacements([1], limit=None), 5.0, 5.0, 59.5, 60.0, 5.0) == [1, 2, 4, 1, 2]


def test_workers_wait_apart():
    replacements = Replacements([1, 2], limit=None)
    delays(replacements, 1.0, 1.0, 1.0, rank=1)
    assert "started again in 1 s" in replacements.after_end(2, now=100.0)
    assert replacements.due(now=101.0) == [2]


def test_who_was_started_is_not_due():
    replacements = Replacements([1], limit=None)
    replacements.after_end(1, now=0.0)
    assert replacements.is_pending
    replacements.note_start(1, now=1.0)
    assert not replacements.due(now=9.0) and not replacements.is_pending


def test_training_waits_where_nobody_else_is_there():
    replacements = Replacements([1, 2], limit=None)
    assert replacements.after_end(1, now=0.0).startswith("the training goes on without it; ")
    assert replacements.after_end(2, now=0.0).startswith("the training waits for it; ")


def test_limit_counts_for_each_worker():
    replacements = Replacements([1, 2], limit=1)
    for rank in (1, 2):
        assert "started again" in replacements.after_end(rank, now=0.0)
        replacements.note_start(rank, now=1.0)
    assert replacements.after_end(1, now=2.0) == "not started again (--worker-restarts 1)"
    assert not replacements.are_used_up
    assert replacements.after_end(2, now=2.0) == "no worker is left (--worker-restarts 1)"
    assert replacements.are_used_up and not replacements.is_pending


def test_who_waits_is_not_gone_for_good():
    replacements = Replacements([1, 2], limit=1)
    for now in (0.0, 2.0):
        replacements.note_start(1, now=now)
        replacements.after_end(1, now=now)
    replacements.after_end(2, now=2.0)
    assert not replacements.are_used_up


def test_without_such_workers_nobody_is_missed():
    assert not Replacements([], limit=0).are_used_up


def test_only_the_chief_tells_of_steps_and_checkpoints():
    liveness = Liveness(2, roles=ROLES, now=0.0, heartbeat_timeout_seconds=1.0, stall_timeout_seconds=0.0)
    liveness.hear(1, b'{"alive": true, "step": 9, "saved": 9}', now=0.0)
    assert (liveness.step, liveness.saved) == (None, None)
    liveness.hear(0, b'{"alive": true, "step": 3, "saved": 1}', now=0.0)
    assert (liveness.step, liveness.saved) == (3, 1)
    assert liveness.judge({1: False}, now=1.0).frozen == {1: "no heartbeat for 1 s"}


def test_training_may_stall_while_a_worker_is_away():
    liveness = Liveness(2, roles=ROLES, now=0.0, heartbeat_timeout_seconds=0.0, stall_timeout_seconds=5.0)
    now = 0.0
    for step in (1, 2):
        now += 0.1
        liveness.hear(0, b'{"step": %d}' % step, now=now)
    while now < 6.0:
        now += 0.5
        liveness.judge({0: False, 3: False}, now=now)
    assert liveness.judge({0: False, 3: False}, now=now).stall == "no worker made a step for 5 s (last steps: 2)"


def outcome(*ends, **more):
    return Outcome(0, 2, ends, roles=ROLES, **more)


def test_the_chief_alone_decides_whether_all_saved():
    told = WorkerEnd(1, -15, was_told=True, task="worker 0")
    assert outcome(WorkerEnd(0, 75), told).is_preempted
    assert not outcome(WorkerEnd(0, 0), told).is_preempted
    assert not outcome(told).is_preempted
    lost = WorkerEnd(3, -9, task="ps 0")
    assert not outcome(lost, WorkerEnd(0, 75, was_told=True)).is_preempted
    assert outcome(lost, WorkerEnd(0, 75, was_told=True), stop_signal=15).is_preempted


def test_who_could_not_be_started():
    assert outcome(unstarted=(3, OSError("no memory"))).describe() == "ps 0 could not be started: no memory"


def test_script_without_heartbeats_gets_on_though_its_servers_send_some():
    restarts = Restarts(workers=2, min_workers=2, max_restarts=5, delay_seconds=1.0)
    for attempt in range(4):
        end = WorkerEnd(0, -9, task="chief")
        failed = Outcome(attempt, 2, (end,), roles=ROLES, heard=frozenset({1, 2, 3}), seconds=100.0)
        assert restarts.after(failed).text == f"restart {attempt + 1} of 5 at once with 2 workers"


def test_server_that_fails_at_once_is_named():
    restarts = Restarts(workers=2, min_workers=2, max_restarts=5, delay_seconds=1.0)
    failed = outcome(WorkerEnd(3, 1, ("ImportError: x",), task="ps 0"), seconds=2.0)
    assert restarts.after(failed).text.startswith("not started again: ps 0 ended by itself 2 s after the first start")
