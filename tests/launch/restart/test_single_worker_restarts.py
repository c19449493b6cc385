"""Restarts of single workers beside parameter servers."""

from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor
from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.restart.restart_policy import RestartPolicy, WorkerBackoff
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.launch.run_spec import run_roles

ROLES = run_roles(2, parameter_servers=1)


def delays(backoff, *lives, rank=1):
    """The time until each start, given how long the worker lived before."""
    now, found = 0.0, []
    backoff.record_start(rank, now=now)
    for life in lives:
        now += life
        backoff.record_exit(rank, now=now)
        before = now
        while not backoff.due(now=now):
            now += 0.25
        found.append(now - before)
        backoff.record_start(rank, now=now)
    return found


def test_time_doubles_up_to_half_a_minute():
    assert delays(WorkerBackoff([1], limit=None), *[5.0] * 7) == [1, 2, 4, 8, 16, 30, 30]


def test_delay_starts_over_after_a_long_life():
    assert delays(WorkerBackoff([1], limit=None), 5.0, 5.0, 59.5, 60.0, 5.0) == [1, 2, 4, 1, 2]


def test_delays_of_workers_are_independent():
    backoff = WorkerBackoff([1, 2], limit=None)
    delays(backoff, 1.0, 1.0, 1.0, rank=1)
    assert "restart in 1 s" in backoff.record_exit(2, now=100.0)
    assert backoff.due(now=101.0) == [2]


def test_started_worker_is_not_due():
    backoff = WorkerBackoff([1], limit=None)
    backoff.record_exit(1, now=0.0)
    assert backoff.is_pending
    backoff.record_start(1, now=1.0)
    assert not backoff.due(now=9.0) and not backoff.is_pending


def test_training_waits_for_the_last_worker():
    backoff = WorkerBackoff([1, 2], limit=None)
    assert backoff.record_exit(1, now=0.0).startswith("training continues without it; ")
    assert backoff.record_exit(2, now=0.0).startswith("training waits for it; ")


def test_limit_counts_for_each_worker():
    backoff = WorkerBackoff([1, 2], limit=1)
    for rank in (1, 2):
        assert "restart in" in backoff.record_exit(rank, now=0.0)
        backoff.record_start(rank, now=1.0)
    assert backoff.record_exit(1, now=2.0) == "not restarted (--worker-restarts 1)"
    assert not backoff.is_exhausted
    assert backoff.record_exit(2, now=2.0) == "no worker is left (--worker-restarts 1)"
    assert backoff.is_exhausted and not backoff.is_pending


def test_not_exhausted_while_a_worker_waits():
    backoff = WorkerBackoff([1, 2], limit=1)
    for now in (0.0, 2.0):
        backoff.record_start(1, now=now)
        backoff.record_exit(1, now=now)
    backoff.record_exit(2, now=2.0)
    assert not backoff.is_exhausted


def test_not_exhausted_without_such_workers():
    assert not WorkerBackoff([], limit=0).is_exhausted


def test_only_the_chief_reports_steps_and_checkpoints():
    monitor = HeartbeatMonitor(ROLES, now=0.0, heartbeat_timeout_seconds=1.0, stall_timeout_seconds=0.0)
    monitor.receive(1, b'{"alive": true, "step": 9, "saved": 9}', now=0.0)
    assert (monitor.step, monitor.saved) == (None, None)
    monitor.receive(0, b'{"alive": true, "step": 3, "saved": 1}', now=0.0)
    assert (monitor.step, monitor.saved) == (3, 1)
    assert monitor.check({1: False}, now=1.0).frozen == {1: "no heartbeat for 1 s"}


def test_training_may_stall_while_a_worker_is_away():
    monitor = HeartbeatMonitor(ROLES, now=0.0, heartbeat_timeout_seconds=0.0, stall_timeout_seconds=5.0)
    now = 0.0
    for step in (1, 2):
        now += 0.1
        monitor.receive(0, b'{"step": %d}' % step, now=now)
    while now < 6.0:
        now += 0.5
        monitor.check({0: False, 3: False}, now=now)
    assert monitor.check({0: False, 3: False}, now=now).stall == "no worker made a step for 5 s (last steps: 2)"


def outcome(*exits, **more):
    return Outcome(0, 2, exits, roles=ROLES, **more)


def test_the_chief_decides_whether_all_saved():
    signalled = WorkerExit(1, -15, was_signalled=True, task="worker 0")
    assert outcome(WorkerExit(0, 75), signalled).is_preempted
    assert not outcome(WorkerExit(0, 0), signalled).is_preempted
    assert not outcome(signalled).is_preempted
    lost = WorkerExit(3, -9, task="ps 0")
    assert not outcome(lost, WorkerExit(0, 75, was_signalled=True)).is_preempted
    assert outcome(lost, WorkerExit(0, 75, was_signalled=True), stop_signal=15).is_preempted


def test_start_failure_names_the_task():
    assert outcome(start_failure=(3, OSError("no memory"))).describe() == "ps 0 could not be started: no memory"


def test_script_without_heartbeats_makes_progress_though_its_servers_send_some():
    restarts = RestartPolicy(workers=2, min_workers=2, max_restarts=5, delay_seconds=1.0)
    for attempt in range(4):
        end = WorkerExit(0, -9, task="chief")
        failed = Outcome(attempt, 2, (end,), roles=ROLES, heartbeat_ranks=frozenset({1, 2, 3}), seconds=100.0)
        assert restarts.decide(failed).text == f"restart {attempt + 1} of 5 at once with 2 workers"


def test_server_that_fails_at_once_is_named():
    restarts = RestartPolicy(workers=2, min_workers=2, max_restarts=5, delay_seconds=1.0)
    failed = outcome(WorkerExit(3, 1, ("ImportError: x",), task="ps 0"), seconds=2.0)
    assert restarts.decide(failed).text.startswith("no restart: ps 0 exited 2 s after the first start")
