import pytest

from tfdist.launch.failure import WorkerEnd
from tfdist.launch.limits import Limits
from tfdist.launch.outcome import Outcome

SAVED, THROUGH, KILLED = WorkerEnd(0, 75), WorkerEnd(1, 0), WorkerEnd(1, -9, was_told=True)


@pytest.mark.parametrize(
    ("ends", "is_preempted"),
    [
        ((SAVED, THROUGH), True),
        ((SAVED, WorkerEnd(1, 75, was_told=True)), True),
        ((SAVED,), False),  # the other is not known to have saved
        ((SAVED, KILLED), False),
        ((SAVED, WorkerEnd(1, 1)), False),
        ((THROUGH, WorkerEnd(0, 0)), False),
    ],
)
def test_preempted_are_all_or_none(ends, is_preempted):
    assert Outcome(0, 2, ends).is_preempted is is_preempted


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(0, 1, (THROUGH,)), 0),
        (Outcome(0, 1, (THROUGH,), stop_signal=15), 143),
        (Outcome(0, 1, (WorkerEnd(0, 3),), stop_signal=15), 143),
        (Outcome(0, 1, (WorkerEnd(0, -9, verdict="frozen: stopped for 10 s"),)), 137),
        (Outcome(0, 1, (WorkerEnd(0, 0, verdict="frozen: stopped for 10 s"),)), 1),  # it had just ended
        (Outcome(0, 1, (WorkerEnd(0, 0, was_told=True),), errors={0: {"type": "KeyError"}}), 1),
        (Outcome(0, 1, (WorkerEnd(0, 0),), errors={0: {"type": "KeyError"}}), 0),
        (Outcome(0, 2, (KILLED,), stall="no worker made a step"), 1),
        (Outcome(0, 2, (SAVED, KILLED)), 75),
    ],
)
def test_exit_code(outcome, code):
    assert outcome.exit_code == code


def test_stall_is_reported_without_a_culprit():
    outcome = Outcome(0, 2, (KILLED, WorkerEnd(0, 1)), stall="no worker made a step for 60 s (last steps: 3, 3)")
    assert (outcome.cause, outcome.failed_rank) == (None, None)
    assert outcome.report()[-1] == "the attempt failed: no worker made a step for 60 s (last steps: 3, 3)"
    assert outcome.report()[0] == "worker 1 ended after that: killed by SIGKILL"


@pytest.mark.parametrize(
    ("grace", "may_restart", "stop", "failure", "patience"),
    [
        (None, False, 25.0, 5.0, 5.0),
        (None, True, 25.0, 0.5, 5.0),
        (60.0, False, 60.0, 60.0, 60.0),
        (60.0, True, 60.0, 0.5, 60.0),
        (0.2, True, 0.2, 0.2, 0.2),
    ],
)
def test_graces(grace, may_restart, stop, failure, patience):
    graces = Limits(grace, 10.0, 600.0).graces(may_restart=may_restart)
    assert (graces.stop, graces.failure, graces.patience) == (stop, failure, patience)
