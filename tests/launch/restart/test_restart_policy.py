import re
import signal
import socket

import pytest

from tfdist.cluster import wait_for_peers
from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.restart.restart_policy import RestartPolicy
from tfdist.launch.restart.worker_exit import WorkerExit

TRACEBACK = "Traceback (most recent call last):"


def restarts(*, workers=3, min_workers=None, max_restarts=10, delay=1.0):
    return RestartPolicy(
        workers=workers, min_workers=min_workers or workers, max_restarts=max_restarts, delay_seconds=delay
    )


def failed(
    attempt, rank=1, *, code=-signal.SIGSEGV, workers=3, step=None, saved=None, heartbeat_ranks=(), lines=(), **more
):
    """An attempt that failed because of one worker."""
    heard = frozenset(range(workers) if step is not None or saved is not None else heartbeat_ranks)
    end = WorkerExit(rank, code, lines)
    return Outcome(attempt, workers, (end,), step=step, saved=saved, heartbeat_ranks=heard, **more)


def test_without_restarts():
    decision = restarts(max_restarts=0).decide(failed(0))
    assert (decision.workers, decision.text) == (0, "")


def test_limit_of_restarts():
    policy = restarts(max_restarts=2)
    assert [policy.is_left, policy.decide(failed(0, step=1)).workers] == [True, 3]
    assert [policy.is_left, policy.decide(failed(1, step=2)).workers] == [True, 3]
    assert not policy.is_left
    decision = policy.decide(failed(2, step=3))
    assert (decision.workers, decision.text) == (0, "no restart: all restarts are used (--max-restarts 2)")


def test_delay_doubles_without_progress_and_there_is_none_with_it():
    policy = restarts(delay=20.0)
    outcomes = [failed(0), failed(1), failed(2, step=6), failed(3, step=2), failed(4, step=9)]
    assert [policy.decide(outcome).delay_seconds for outcome in outcomes] == [20.0, 30.0, 0.0, 20.0, 0.0]
    policy = restarts(delay=1.0)
    assert [policy.decide(outcome).delay_seconds for outcome in (failed(0), failed(1))] == [1.0, 2.0]
    assert restarts(delay=40.0).decide(failed(0)).delay_seconds == 40.0
    assert restarts(delay=1.0).decide(failed(0)).text == "restart 1 of 10 in 1 s with 3 workers"


def test_no_progress_between_two_restarts():
    policy = restarts()
    assert policy.decide(failed(0, step=41, saved=4)).workers
    assert policy.decide(failed(1, step=41, saved=3)).workers
    decision = policy.decide(failed(2, step=40, saved=4))
    assert not decision.workers
    assert "the last two restarts made no progress (none got beyond step 41, none saved" in decision.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_signals_from_outside_are_no_lack_of_progress(number):
    policy = restarts(max_restarts=6)
    decisions = [policy.decide(failed(n, code=-number, step=41, saved=4)) for n in range(7)]
    assert [decision.workers for decision in decisions] == [3, 3, 3, 3, 3, 3, 0]
    assert [decision.delay_seconds for decision in decisions[:6]] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert decisions[6].text == "no restart: all restarts are used (--max-restarts 6)"


def lost_host(attempt, **more):
    """An attempt that failed because a host was lost."""
    return Outcome(attempt, 3, (), lost="host b was lost", heartbeat_ranks=frozenset({0}), **more)


def killed(attempt, number=signal.SIGKILL, **more):
    """An attempt in which something outside has killed a worker."""
    return failed(attempt, code=-number, heartbeat_ranks=[0], **more)


DELAYS = {
    "killed before the first step": (1.0, [killed] * 8, [{}] * 8, [1, 2, 4, 8, 16, 30, 30, 30]),
    "killed at the same step": (1.0, [killed] * 8, [{"step": 7}] * 8, [0, 1, 2, 4, 8, 16, 30, 30]),
    "killed after progress": (1.0, [killed] * 4, [{"step": step} for step in range(4)], [0, 0, 0, 0]),
    "progress starts the delay over": (
        1.0,
        [killed] * 6,
        [{"step": step} for step in (7, 7, 6, 8, 8, 8)],
        [0, 1, 2, 0, 1, 2],
    ),
    "so does a checkpoint": (1.0, [killed] * 4, [{"step": 7, "saved": n} for n in (0, 0, 1, 1)], [0, 1, 0, 1]),
    "lost hosts": (0.5, [lost_host] * 8, [{"step": 7}] * 8, [0, 0.5, 1, 2, 4, 8, 16, 30]),
    "signals, hosts and errors share the delay": (
        1.0,
        [killed, lost_host, failed, killed, lost_host],
        [{"step": 7}] * 5,
        [0, 1, 2, 4, 8],
    ),
    "no delay is never one": (0.0, [killed] * 4, [{}] * 4, [0, 0, 0, 0]),
    "a first delay above the limit": (40.0, [killed] * 3, [{}] * 3, [40, 40, 40]),
}


@pytest.mark.parametrize(("delay", "kinds", "details", "expected"), DELAYS.values(), ids=DELAYS)
def test_delays_after_failures(delay, kinds, details, expected):
    policy = restarts(delay=delay)
    outcomes = [kind(attempt, **more) for attempt, (kind, more) in enumerate(zip(kinds, details, strict=True))]
    decisions = [policy.decide(outcome) for outcome in outcomes]
    assert [decision.delay_seconds for decision in decisions] == expected
    assert all(decision.workers == 3 for decision in decisions)
    announced = [f"in {seconds:g} s" if seconds else "at once" for seconds in expected]
    texts = [f"restart {n} of 10 {when} with 3 workers" for n, when in enumerate(announced, start=1)]
    assert [decision.text for decision in decisions] == texts


def test_lost_hosts_are_no_lack_of_progress():
    policy = restarts(max_restarts=6)
    lost = [lost_host(n, step=7) for n in range(7)]
    assert [policy.decide(outcome).workers for outcome in lost] == [3, 3, 3, 3, 3, 3, 0]


def test_an_error_of_the_script_between_signals_still_counts():
    policy = restarts()
    codes = [1, -signal.SIGKILL, 1, -signal.SIGKILL, 1]
    decisions = [policy.decide(failed(n, code=code, step=41)) for n, code in enumerate(codes)]
    assert [bool(decision.workers) for decision in decisions] == [True, True, True, True, False]
    assert "made no progress" in decisions[-1].text


@pytest.mark.parametrize(
    "more",
    [
        {"code": 1},
        {"code": -signal.SIGABRT},
        {"code": -signal.SIGKILL, "errors": {1: {"type": "ValueError", "message": "no"}}},
    ],
)
def test_errors_of_the_script_end_the_run(more):
    policy = restarts()
    decisions = [policy.decide(failed(n, step=41, **more)) for n in range(3)]
    assert [bool(decision.workers) for decision in decisions] == [True, True, False]


def test_no_progress_before_the_first_step():
    policy = restarts()
    assert policy.decide(failed(0, heartbeat_ranks=[0])).workers
    assert policy.decide(failed(1, heartbeat_ranks=[0])).workers
    assert "none got to a first step" in policy.decide(failed(2, heartbeat_ranks=[0])).text


@pytest.mark.parametrize("progress", [{"step": 42, "saved": 4}, {"step": 30, "saved": 5}])
def test_a_step_or_a_checkpoint_is_progress(progress):
    policy = restarts()
    assert policy.decide(failed(0, step=41, saved=4)).workers
    assert policy.decide(failed(1, step=41, saved=4)).workers
    assert policy.decide(failed(2, **progress)).workers
    assert policy.decide(failed(3, step=1, saved=1)).workers
    assert not policy.decide(failed(4, step=1, saved=1)).workers


def test_a_later_fit_is_progress_though_its_steps_start_at_0():
    policy = restarts()
    reached = [(1, 900, 9), (2, 40, None), (2, 80, 0), (2, 80, 0), (3, 5, 0)]
    outcomes = [failed(n, fit=fit, step=step, saved=saved) for n, (fit, step, saved) in enumerate(reached)]
    decisions = [policy.decide(outcome) for outcome in outcomes]
    assert all(decision.workers for decision in decisions)
    assert [decision.delay_seconds for decision in decisions] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_a_checkpoint_of_a_later_fit_is_progress():
    policy = restarts()
    assert policy.decide(failed(0, fit=2, step=80)).workers
    assert all(policy.decide(failed(n, fit=2, step=40, saved=n)).workers for n in range(1, 5))


def test_no_progress_in_a_later_fit():
    policy = restarts()
    assert policy.decide(failed(0, fit=1, step=900, saved=9)).workers
    assert policy.decide(failed(1, fit=2, step=40, saved=1)).workers
    assert policy.decide(failed(2, fit=1, step=900, saved=9)).workers
    decision = policy.decide(failed(3, fit=2, step=40, saved=1))
    assert not decision.workers
    assert "(none got beyond step 40 of fit 2, none saved a new checkpoint)" in decision.text


def test_a_script_may_skip_a_fit_when_it_is_restarted():
    policy = restarts()
    reached = [(2, 500), (1, 400), (1, 900), (1, 1300), (1, 1700)]  # what was the second one is the first one now
    assert all(policy.decide(failed(n, fit=fit, step=step)).workers for n, (fit, step) in enumerate(reached))


def test_no_step_in_a_later_fit():
    policy = restarts()
    assert all(policy.decide(failed(n, fit=2, heartbeat_ranks=[0])).workers for n in range(2))
    assert "none got to a first step of fit 2" in policy.decide(failed(2, fit=2, heartbeat_ranks=[0])).text


def test_a_script_without_heartbeats_makes_progress_by_running_long():
    policy = restarts()
    outcomes = [failed(0, seconds=1), failed(1, seconds=1), failed(2, seconds=60), failed(3, seconds=1)]
    assert all(policy.decide(outcome).workers for outcome in outcomes)
    assert policy.decide(failed(4, seconds=1)).text.endswith("the last two restarts ended within 60 s")


@pytest.mark.parametrize(
    ("outcome", "is_started"),
    [
        (failed(0, code=1, seconds=5.0), False),
        (failed(0, code=2, seconds=59.9), False),
        (failed(0, code=1, seconds=5.0, heartbeat_ranks=[0]), False),  # another worker had begun
        (failed(0, code=1, seconds=5.0, heartbeat_ranks=[1]), True),
        (failed(0, code=1, seconds=60.0), True),
        (failed(1, code=1, seconds=5.0), True),  # a later attempt: what it does now it did not do before
        (failed(0, code=-9, seconds=5.0), True),
        (failed(0, code=75, seconds=5.0), True),
        (failed(0, code=1, lines=(TRACEBACK, "UnavailableError: Socket closed")), True),
        (failed(0, code=1, lines=(TRACEBACK, "TimeoutError: The cluster was not complete after 5 s. Received")), True),
        (failed(0, code=1, lines=(TRACEBACK, "RuntimeError: Could not start gRPC server")), True),
        (failed(0, code=1, lines=(TRACEBACK, "ModuleNotFoundError: No module named 'keras'")), False),
    ],
)
def test_failure_before_the_first_heartbeat(outcome, is_started):
    decision = restarts().decide(outcome)
    assert bool(decision.workers) is is_started
    reason = r"no restart: worker 1 exited \d+ s after the first start, before its first heartbeat"
    assert bool(re.match(reason, decision.text)) is not is_started


def _no_answer():
    with socket.socket() as holder:  # which does not listen
        holder.bind(("127.0.0.1", 0))
        unused = f"127.0.0.1:{holder.getsockname()[1]}"
        wait_for_peers("127.0.0.1:0", {"worker 1": unused}, timeout_seconds=0.0)


def _taken_port():
    with socket.create_server(("", 0)) as server:
        wait_for_peers(f"127.0.0.1:{server.getsockname()[1]}", {"worker 1": "127.0.0.1:1"}, timeout_seconds=0.0)


@pytest.mark.parametrize("fail", [_no_answer, _taken_port])
def test_errors_of_a_start_that_may_succeed_the_next_time(fail):
    """The policy recognises the errors that tfdist itself raises by their text."""
    with pytest.raises(OSError) as raised:
        fail()
    assert restarts().decide(failed(0, code=1, lines=(TRACEBACK, f"OSError: {raised.value}"))).workers


def test_frozen_worker_is_no_failure_before_the_first_heartbeat():
    end = WorkerExit(1, 1, failure_reason="frozen: stopped for 10 s")
    assert restarts().decide(Outcome(0, 3, (end,), seconds=5.0)).workers


def numbers(policy, ranks, **more):
    """The numbers of workers of the attempts after failures of these ranks."""
    found, workers = [], 3
    for attempt, rank in enumerate(ranks):
        workers = policy.decide(failed(attempt, rank, workers=workers, step=attempt, **more)).workers
        found.append(workers)
    return found


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((1, 1, 0, 1), [3, 2, 3, 3]),  # one less, then all again, and nothing is remembered
        ((1, 1, 1, 1, 1), [3, 2, 3, 3, 2]),
        ((0, 1, 0, 1), [3, 3, 3, 3]),
        ((0, 1, 1), [3, 3, 2]),
    ],
)
def test_one_worker_less_when_the_same_rank_fails_twice_in_a_row(ranks, expected):
    assert numbers(restarts(min_workers=1), ranks) == expected


def test_never_fewer_than_min_workers():
    assert numbers(restarts(), (1, 1, 1)) == [3, 3, 3]


def test_worker_that_cannot_be_started_is_left_out():
    policy = restarts(min_workers=1)
    policy.decide(failed(0, step=1))
    start_failure = [Outcome(n, 4 - n, (), start_failure=(2, OSError("no memory")), step=n + 1) for n in (1, 2, 3)]
    assert [policy.decide(outcome).workers for outcome in start_failure] == [2, 1, 1]
    assert policy.decide(failed(4, step=9, workers=1)).workers == 3


def test_stall_is_no_workers_fault():
    policy = restarts(min_workers=1)
    stalls = [
        Outcome(n, 3, (), stall="no worker made a step", heartbeat_ranks=frozenset({0}), step=n) for n in range(3)
    ]
    assert [policy.decide(stall).workers for stall in stalls] == [3, 3, 3]


def test_fewer_workers_are_announced():
    policy = restarts(min_workers=1)
    policy.decide(failed(0, step=1))
    assert policy.decide(failed(1, step=2)).text == "restart 2 of 10 at once with 2 workers, 1 fewer than requested"
