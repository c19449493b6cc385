"""The status of a run: its line and its messages, from the heartbeats."""

import json

import pytest

from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor
from tfdist.launch.processes.run_status import RunStatus
from tfdist.launch.run_spec import run_roles


class Run:
    """Attempts whose heartbeats the test sends."""

    def __init__(self, workers=2):
        self.status, self.workers = RunStatus(workers), workers

    def begin(self, attempt=0, roles=None, now=0.0):
        roles = run_roles(self.workers) if roles is None else roles
        self.monitor = HeartbeatMonitor(
            roles,
            now=now,
            heartbeat_timeout_seconds=10.0,
            stall_timeout_seconds=0.0,
        )
        self.status.begin_attempt(attempt, roles, self.monitor, now=now)

    def say(self, rank=0, *, now=0.0, **said):
        self.monitor.receive(rank, json.dumps({"alive": True, **said}).encode(), now=now)


@pytest.fixture
def run():
    run = Run()
    run.begin()
    return run


def test_the_line_without_heartbeats_shows_the_time(run):
    assert run.status.line(now=0.0) == "tfdist: 2 workers · running for 0 s"
    assert run.status.line(now=119.9) == "tfdist: 2 workers · running for 119 s"
    assert run.status.line(now=120.0) == "tfdist: 2 workers · running for 2 min"
    assert run.status.line(now=7260.0) == "tfdist: 2 workers · running for 2 h 1 min"


def test_the_line_of_a_training(run):
    run.say(1, step=1229)
    run.say(0, step=1230)
    assert run.status.line(now=1.0) == "tfdist: 2 workers · step 1,230"
    run.say(0, step=1230, phase="validation")
    assert run.status.line(now=1.0) == "tfdist: 2 workers · step 1,230 · validation"
    run.say(0, step=1231, saved=5, saved_step=1200)
    assert run.status.line(now=2.0) == "tfdist: 2 workers · step 1,231 · checkpoint 1,200, 0 s ago"
    run.say(0, step=1231, saved=5, saved_step=1200)
    assert run.status.line(now=14.0) == "tfdist: 2 workers · step 1,231 · checkpoint 1,200, 12 s ago"


def test_the_line_of_an_elastic_training_while_workers_are_away(run):
    totals = {"lost": 1, "joined": 0, "repeated_steps": 1, "seconds_lost": 0.1}
    run.say(1, step=8, membership={**totals, "training": 1})
    assert run.status.line(now=1.0) == "tfdist: 1 of 2 workers train · step 8"
    run.say(1, step=9, membership={**totals, "joined": 1, "training": 2})
    assert run.status.line(now=1.0) == "tfdist: 2 workers · step 9"


def test_restarts_and_missing_workers_are_in_the_line_and_the_checkpoint_stays(run):
    run.say(step=50, saved=3, saved_step=40)
    run.status.line(now=1.0)
    run.begin(1, now=10.0)
    assert run.status.line(now=11.0) == "tfdist: 2 workers · running for 1 s · 1 restart · checkpoint 40, 10 s ago"
    run.begin(2, run_roles(1), now=20.0)
    run.say(step=41, now=20.0)
    assert run.status.line(now=21.0) == "tfdist: 1 of 2 workers · step 41 · 2 restarts · checkpoint 40, 20 s ago"


def test_a_checkpoint_of_a_restart_counts_if_it_is_newer(run):
    run.say(saved=3, saved_step=40)
    run.status.line(now=1.0)
    run.begin(1)
    run.say(saved=2, saved_step=20)
    assert "checkpoint 40" in run.status.line(now=2.0)
    run.say(saved=4, saved_step=30)
    assert "checkpoint 30, 0 s ago" in run.status.line(now=3.0)


def test_a_later_fit_is_named_and_has_its_steps_and_checkpoints(run):
    run.say(step=900, saved=9, saved_step=900)
    assert run.status.new_messages(now=0.0) == [
        "training resumes after step 900 with 2 workers",
        "checkpoint saved at step 900",
    ]
    run.say(fit=2, step=7)
    assert run.status.line(now=1.0) == "tfdist: 2 workers · step 7 of fit 2"
    run.say(fit=2, step=12, saved=0, saved_step=10)
    assert run.status.line(now=2.0) == "tfdist: 2 workers · step 12 of fit 2 · checkpoint 10 of fit 2, 0 s ago"
    assert run.status.new_messages(now=20.0) == ["checkpoint saved at step 10 of fit 2"]
    run.begin(1, now=20.0)
    run.say(step=900, now=20.0)  # complete: nothing is saved
    assert run.status.line(now=22.0).endswith("step 900 · 1 restart · checkpoint 10 of fit 2, 20 s ago")
    run.begin(2, now=30.0)
    run.say(fit=2, step=10, now=30.0)
    assert run.status.new_messages(now=30.0) == ["training resumes after step 10 of fit 2 with 2 workers (restart 2)"]


def test_checkpoints_are_reported_if_a_restart_skips_a_fit(run):
    run.say(fit=2, step=12, saved=3, saved_step=10)
    run.status.new_messages(now=0.0)
    run.begin(1, now=20.0)
    run.say(step=40, saved=4, saved_step=40, now=20.0)  # what was the second `fit` is the first one now
    assert run.status.line(now=20.0).endswith("step 40 · 1 restart · checkpoint 40, 0 s ago")


def test_parameter_servers_are_named():
    run = Run()
    run.begin(0, run_roles(2, parameter_servers=1))
    run.say(0, step=3)
    assert run.status.line(now=0.0) == "tfdist: 1 chief, 2 workers, 1 parameter server · step 3"
    assert run.status.new_messages(now=0.0) == [
        "training resumes after step 3 with 1 chief, 2 workers, 1 parameter server"
    ]


def test_messages_are_reported_once(run):
    assert run.status.new_messages(now=0.0) == []
    run.say(step=0)
    assert run.status.new_messages(now=0.0) == ["training begins with 2 workers"]
    run.say(step=1)
    assert run.status.new_messages(now=1.0) == []
    run.say(step=2, saved=0, saved_step=1_000)
    assert run.status.new_messages(now=2.0) == ["checkpoint saved at step 1,000"]
    assert run.status.new_messages(now=20.0) == []


def test_frequent_checkpoints_are_reported_less_often_but_the_last_one_always(run):
    told = []
    for second in range(26):
        run.say(saved=second, saved_step=second, now=second)
        told += run.status.new_messages(now=float(second))
    assert told == [f"checkpoint saved at step {step}" for step in (0, 10, 20)]
    assert run.status.new_messages(now=25.0, is_over=True) == ["checkpoint saved at step 25"]
    assert run.status.new_messages(now=25.0, is_over=True) == []


def test_messages_about_restarts_name_the_workers(run):
    run.say(step=0)
    run.status.new_messages(now=0.0)
    run.begin(1)
    assert run.status.new_messages(now=1.0) == []
    run.say(step=30)
    assert run.status.new_messages(now=2.0) == ["training resumes after step 30 with 2 workers (restart 1)"]
    run.begin(2, run_roles(1))
    run.say(step=40)
    assert run.status.new_messages(now=3.0) == [
        "training resumes after step 40 with 1 of 2 workers (restart 2, before with 2 workers)"
    ]
    run.begin(3)
    run.say(step=0)
    assert run.status.new_messages(now=4.0) == [
        "training begins with 2 workers (restart 3, before with 1 of 2 workers)"
    ]


def test_a_checkpoint_without_its_step_is_not_reported(run):
    run.say(step=1, saved=4)
    assert run.status.line(now=0.0) == "tfdist: 2 workers · step 1"
    assert run.status.new_messages(now=0.0) == ["training resumes after step 1 with 2 workers"]
