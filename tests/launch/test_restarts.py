import re

import pytest

from tfdist.launch.failure import WorkerEnd
from tfdist.launch.outcome import Outcome
from tfdist.launch.restarts import Restarts

TRACEBACK = "Traceback (most recent call last):"


def restarts(*, workers=3, min_workers=None, max_restarts=10, delay=1.0):
    return Restarts(workers=workers, min_workers=min_workers or workers, max_restarts=max_restarts, delay_seconds=delay)


def failed(attempt, rank=1, *, code=-9, workers=3, step=None, saved=None, heard=(), lines=(), **more):
    """An attempt that a worker's end has ended."""
    heard = frozenset(range(workers) if step is not None or saved is not None else heard)
    end = WorkerEnd(rank, code, lines)
    return Outcome(attempt, workers, (end,), step=step, saved=saved, heard=heard, **more)


def test_none_are_asked_for():
    decision = restarts(max_restarts=0).after(failed(0))
    assert (decision.workers, decision.text) == (0, "")


def test_at_most_so_many():
    counted = restarts(max_restarts=2)
    assert [counted.are_left, counted.after(failed(0, step=1)).workers] == [True, 3]
    assert [counted.are_left, counted.after(failed(1, step=2)).workers] == [True, 3]
    assert not counted.are_left
    decision = counted.after(failed(2, step=3))
    assert (decision.workers, decision.text) == (0, "not started again: no restart is left (--max-restarts 2)")


def test_delay_doubles_without_progress_and_there_is_none_with_it():
    counted = restarts(delay=20.0)
    outcomes = [failed(0), failed(1), failed(2, step=6), failed(3, step=2), failed(4, step=9)]
    assert [counted.after(outcome).delay_seconds for outcome in outcomes] == [20.0, 30.0, 0.0, 20.0, 0.0]
    counted = restarts(delay=1.0)
    assert [counted.after(outcome).delay_seconds for outcome in (failed(0), failed(1))] == [1.0, 2.0]
    assert restarts(delay=40.0).after(failed(0)).delay_seconds == 40.0
    assert restarts(delay=1.0).after(failed(0)).text == "restart 1 of 10 in 1 s with 3 workers"


def test_no_progress_between_two_restarts():
    counted = restarts()
    assert counted.after(failed(0, step=41, saved=4)).workers
    assert counted.after(failed(1, step=41, saved=3)).workers
    decision = counted.after(failed(2, step=40, saved=4))
    assert not decision.workers
    assert "the last two restarts made no progress (none got beyond step 41, none saved" in decision.text


def test_no_progress_before_the_first_step():
    counted = restarts()
    assert counted.after(failed(0, heard=[0])).workers
    assert counted.after(failed(1, heard=[0])).workers
    assert "none got to a first step" in counted.after(failed(2, heard=[0])).text


@pytest.mark.parametrize("progress", [{"step": 42, "saved": 4}, {"step": 30, "saved": 5}])
def test_a_step_or_a_checkpoint_is_progress(progress):
    counted = restarts()
    assert counted.after(failed(0, step=41, saved=4)).workers
    assert counted.after(failed(1, step=41, saved=4)).workers
    assert counted.after(failed(2, **progress)).workers
    assert counted.after(failed(3, step=1, saved=1)).workers
    assert not counted.after(failed(4, step=1, saved=1)).workers


def test_a_later_fit_is_progress_though_its_steps_begin_anew():
    counted = restarts()
    reached = [(1, 900, 9), (2, 40, None), (2, 80, 0), (2, 80, 0), (3, 5, 0)]
    outcomes = [failed(n, fit=fit, step=step, saved=saved) for n, (fit, step, saved) in enumerate(reached)]
    decisions = [counted.after(outcome) for outcome in outcomes]
    assert all(decision.workers for decision in decisions)
    assert [decision.delay_seconds for decision in decisions] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_a_checkpoint_of_a_later_fit_is_progress():
    counted = restarts()
    assert counted.after(failed(0, fit=2, step=80)).workers
    assert all(counted.after(failed(n, fit=2, step=40, saved=n)).workers for n in range(1, 5))


def test_no_progress_in_a_later_fit():
    counted = restarts()
    assert counted.after(failed(0, fit=1, step=900, saved=9)).workers
    assert counted.after(failed(1, fit=2, step=40, saved=1)).workers
    assert counted.after(failed(2, fit=1, step=900, saved=9)).workers
    decision = counted.after(failed(3, fit=2, step=40, saved=1))
    assert not decision.workers
    assert "(none got beyond step 40 of fit 2, none saved a new checkpoint)" in decision.text


def test_a_program_may_leave_out_a_fit_when_it_is_started_again():
    counted = restarts()
    reached = [(2, 500), (1, 400), (1, 900), (1, 1300), (1, 1700)]  # what was the second one is the first one now
    assert all(counted.after(failed(n, fit=fit, step=step)).workers for n, (fit, step) in enumerate(reached))


def test_no_step_in_a_later_fit():
    counted = restarts()
    assert all(counted.after(failed(n, fit=2, heard=[0])).workers for n in range(2))
    assert "none got to a first step of fit 2" in counted.after(failed(2, fit=2, heard=[0])).text


def test_a_script_without_heartbeats_gets_on_by_lasting():
    counted = restarts()
    outcomes = [failed(0, seconds=1), failed(1, seconds=1), failed(2, seconds=60), failed(3, seconds=1)]
    assert all(counted.after(outcome).workers for outcome in outcomes)
    assert counted.after(failed(4, seconds=1)).text.endswith("the last two restarts ended within 60 s")


@pytest.mark.parametrize(
    ("outcome", "is_started"),
    [
        (failed(0, code=1, seconds=5.0), False),
        (failed(0, code=2, seconds=59.9), False),
        (failed(0, code=1, seconds=5.0, heard=[0]), False),  # another worker had begun
        (failed(0, code=1, seconds=5.0, heard=[1]), True),
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
def test_failure_before_it_began(outcome, is_started):
    decision = restarts().after(outcome)
    assert bool(decision.workers) is is_started
    reason = r"not started again: worker 1 ended by itself \d+ s after the first start and before its first heartbeat"
    assert bool(re.match(reason, decision.text)) is not is_started


def test_frozen_worker_is_no_failure_before_it_began():
    end = WorkerEnd(1, 1, verdict="frozen: stopped for 10 s")
    assert restarts().after(Outcome(0, 3, (end,), seconds=5.0)).workers


def numbers(counted, ranks, **more):
    """The numbers of workers of the attempts after failures of these ranks."""
    found, workers = [], 3
    for attempt, rank in enumerate(ranks):
        workers = counted.after(failed(attempt, rank, workers=workers, step=attempt, **more)).workers
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


def test_never_fewer_than_the_least_number():
    assert numbers(restarts(), (1, 1, 1)) == [3, 3, 3]


def test_worker_that_cannot_be_started_is_left_out():
    counted = restarts(min_workers=1)
    counted.after(failed(0, step=1))
    unstarted = [Outcome(n, 4 - n, (), unstarted=(2, OSError("no memory")), step=n + 1) for n in (1, 2, 3)]
    assert [counted.after(outcome).workers for outcome in unstarted] == [2, 1, 1]
    assert counted.after(failed(4, step=9, workers=1)).workers == 3


def test_stall_is_no_workers_fault():
    counted = restarts(min_workers=1)
    stalls = [Outcome(n, 3, (), stall="no worker made a step", heard=frozenset({0}), step=n) for n in range(3)]
    assert [counted.after(stall).workers for stall in stalls] == [3, 3, 3]


def test_fewer_workers_are_announced():
    counted = restarts(min_workers=1)
    counted.after(failed(0, step=1))
    assert counted.after(failed(1, step=2)).text == "restart 2 of 10 at once with 2 workers, 1 fewer than asked for"
