import pytest

from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.launch.run_config import Timeouts

SAVED, FINISHED, KILLED = WorkerExit(0, 75), WorkerExit(1, 0), WorkerExit(1, -9, was_signalled=True)


@pytest.mark.parametrize(
    ("exits", "is_preempted"),
    [
        ((SAVED, FINISHED), True),
        ((SAVED, WorkerExit(1, 75, was_signalled=True)), True),
        ((SAVED,), False),  # the other is not known to have saved
        ((SAVED, KILLED), False),
        ((SAVED, WorkerExit(1, 1)), False),
        ((FINISHED, WorkerExit(0, 0)), False),
    ],
)
def test_preempted_are_all_or_none(exits, is_preempted):
    assert Outcome(0, 2, exits).is_preempted is is_preempted


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(0, 1, (FINISHED,)), 0),
        (Outcome(0, 1, (FINISHED,), stop_signal=15), 143),
        (Outcome(0, 1, (WorkerExit(0, 3),), stop_signal=15), 143),
        (Outcome(0, 1, (WorkerExit(0, -9, failure_reason="frozen: stopped for 10 s"),)), 137),
        (Outcome(0, 1, (WorkerExit(0, 0, failure_reason="frozen: stopped for 10 s"),)), 1),  # it had just ended
        (Outcome(0, 1, (WorkerExit(0, 0, was_signalled=True),), errors={0: {"type": "KeyError"}}), 1),
        (Outcome(0, 1, (WorkerExit(0, 0),), errors={0: {"type": "KeyError"}}), 0),
        (Outcome(0, 2, (KILLED,), stall="no worker made a step"), 1),
        (Outcome(0, 2, (SAVED, KILLED)), 75),
    ],
)
def test_exit_code(outcome, code):
    assert outcome.exit_code == code


def test_stall_is_reported_without_a_culprit():
    outcome = Outcome(0, 2, (KILLED, WorkerExit(0, 1)), stall="no worker made a step for 60 s (last steps: 3, 3)")
    assert (outcome.root_cause, outcome.failed_rank) == (None, None)
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
def test_grace_periods(grace, may_restart, stop, failure, patience):
    grace_periods = Timeouts(grace, 10.0, 600.0).grace_periods(may_restart=may_restart)
    assert (grace_periods.stop, grace_periods.failure, grace_periods.patience) == (stop, failure, patience)
