import pytest

from tfdist.launch.restart.attempt_outcome import Outcome, decode_outcome, encode_outcome
from tfdist.launch.restart.worker_exit import WorkerExit
from tfdist.launch.run_spec import RunSpec, run_roles

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


def test_preempted_without_a_worker_that_had_been_lost():
    outcome = Outcome(0, 2, (SAVED,), roles=run_roles(2, is_elastic=True), left_out=frozenset({1}))
    assert outcome.is_preempted


def test_too_few_workers_is_a_failure_even_without_a_culprit():
    outcome = Outcome(0, 2, (KILLED,), too_few="0 workers left of at least 1")
    assert (outcome.has_failed, outcome.exit_code) == (True, 1)
    assert outcome.report()[-1] == "the attempt failed: 0 workers left of at least 1"


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
    grace_periods = RunSpec(grace=grace).grace_periods(may_restart=may_restart)
    assert (grace_periods.stop, grace_periods.failure, grace_periods.patience) == (stop, failure, patience)


def test_outcomes_pass_complete():
    ends = (WorkerExit(1, -9, ("one", "two"), failure_reason="frozen", at=1.5), WorkerExit(2, 1, was_signalled=True))
    outcome = Outcome(
        0,
        2,
        ends,
        stall="stands",
        start_failure=(3, OSError("no room")),
        heartbeat_ranks=frozenset({1}),
        fit=2,
        step=4,
        errors={1: {"a": "b"}},
    )
    back = decode_outcome(encode_outcome(outcome), "h")
    assert [(end.rank, end.returncode, end.last_lines, end.host) for end in back.exits] == [
        (1, -9, ("one", "two"), "h"),
        (2, 1, (), "h"),
    ]
    assert (back.exits[0].failure_reason, back.exits[0].at, back.exits[1].was_signalled) == ("frozen", 1.5, True)
    assert (back.stall, back.heartbeat_ranks, back.errors) == ("stands", {1}, {1: {"a": "b"}})
    assert (back.fit, back.step, back.saved) == (2, 4, None)
    assert (back.start_failure[0], str(back.start_failure[1])) == (3, "no room")


def test_long_outcomes_are_cut():
    """So that they are no longer than a message may be."""
    ends = tuple(WorkerExit(rank, 1, ("x" * 10_000,) * 200) for rank in range(100))
    assert len(str(encode_outcome(Outcome(0, 100, ends)))) < 2 * 2**20
