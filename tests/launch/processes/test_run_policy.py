"""What the policy of a run on one host starts, and how it ends the run."""

import dataclasses
import socket
import types

import pytest
from replaced_clocks import set_clock

from tfdist.launch.processes import run_policy
from tfdist.launch.processes.run_policy import SingleNodePolicy
from tfdist.launch.restart.attempt_outcome import ErrorFile, Outcome
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.launch.run_spec import RunSpec


class Signals:
    """The signals that a test lets arrive."""

    def __init__(self, fd) -> None:
        self.fd, self.received = fd, []


@pytest.fixture
def signals():
    near, far = socket.socketpair()
    with near, far:
        yield Signals(near.fileno())


@pytest.fixture
def said():
    return []


@pytest.fixture
def policy(said):
    """A run of three workers, or at least one, with three restarts and no delay."""
    return policy_of(said, delay_seconds=0.0)


def policy_of(said, *, delay_seconds):
    spec = RunSpec(workers=3, min_workers=1, max_restarts=3, restart_delay=delay_seconds, run_id="f00d", run_seed=7)
    return SingleNodePolicy(spec, error_file=ErrorFile(None, None), say=lambda *lines: said.extend(lines))


def failed(attempt, code=-9, *, workers=3):
    """An attempt that failed because of worker 1."""
    return Outcome(attempt, workers, (WorkerExit(1, code),), step=attempt, heartbeat_ranks=frozenset({1}))


def test_smaller_attempt(policy, signals):
    """Workers compute the same global batch as all workers would: they are told the number that was requested."""
    starts = []
    for attempt in range(3):
        starts.append(policy.next_attempt(signals))
        policy.attempt_ended(failed(attempt), signals)
    assert [start.attempt for start in starts] == [0, 1, 2]
    assert [(len(start.local_roles), len(start.addresses)) for start in starts] == [(3, 3), (3, 3), (2, 2)]
    assert {start.full_workers for start in starts} == {3} and {start.run_id for start in starts} == {"f00d"}
    assert all(start.may_restart for start in starts)
    assert not policy.next_attempt(signals).may_restart, "the last restart"


def test_delay_counts_from_the_failure(monkeypatch, said, signals):
    """It runs while the other workers are ended."""
    clock = set_clock(monkeypatch, run_policy)
    waited = []

    def select(readers, writers, errors, seconds):
        waited.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(run_policy, "select", types.SimpleNamespace(select=select))
    signals.clear_wakeup = lambda: None
    policy = policy_of(said, delay_seconds=4.0)
    policy.next_attempt(signals)
    clock.now = 111.0
    policy.attempt_ended(dataclasses.replace(failed(0), failed_at=110.0, heartbeat_ranks=frozenset()), signals)
    policy.next_attempt(signals)
    assert waited == [3.0]


def test_signal_before_a_restart(policy, signals):
    policy.next_attempt(signals)
    policy.attempt_ended(failed(0), signals)
    signals.received.append(15)
    assert policy.next_attempt(signals) == 143


def test_signal_during_a_failure_leads_to_no_restart(policy, signals, said):
    policy.next_attempt(signals)
    signals.received.append(15)
    policy.attempt_ended(failed(0, 3), signals)
    assert policy.next_attempt(signals) == 3
    assert not any(line.startswith("restart") for line in said)


def test_worker_that_cannot_be_started(policy, signals):
    """In the first attempt the command is wrong; later it is a failure."""
    error = OSError("no room")
    with pytest.raises(OSError, match="no room"):
        policy.attempt_ended(Outcome(0, 3, (), start_failure=(2, error)), signals)
    policy.attempt_ended(failed(0), signals)
    policy.attempt_ended(Outcome(1, 3, (), start_failure=(2, error)), signals)
    assert len(policy.next_attempt(signals).local_roles) == 2
