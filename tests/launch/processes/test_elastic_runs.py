"""`tfdist run --elastic`: a worker that is lost is restarted alone, and the attempt fails when too few are left."""

import json
import signal
import textwrap

import pytest
from role_runs import lines_of

from tfdist.launch.cli.resize_command import request
from tfdist.utils.argument_checks import UsageError

# A process that replaces another one has another life.
LIVES = """
def life_file(rank, life):
    return f"pid-{ATTEMPT}-of-{rank}-life-{life}"

LIFE = sum((HERE / life_file(RANK, life)).exists() for life in range(9))
note(life_file(RANK, LIFE), os.getpid())
"""
KILLED = "killed by SIGKILL (possibly the OOM killer)"
# Workers that are not restarted for 4 s, because it is their third death.
DIES_THREE_TIMES = """
if RANK == 1 and LIFE < 3:
    wait_for("up-0")
    die()
"""


# Worker 1 is lost, and waits to join when it is started again; then the others end.
WAITS_TO_JOIN = """
    if RANK == 1 and LIFE == 0:
        wait_for(life_file(0, 0))
        die()
    if RANK == 1:
        beat(step=0)
        note("waiting")
        hang()
    wait_for("waiting")
"""


def elastic(script):
    return LIVES + textwrap.dedent(script)


def test_killed_worker_is_restarted_alone(run, tmp_path):
    script = """
        print(LIFE, os.environ["TF_CONFIG"], ATTEMPT, os.environ["TFDIST_ELASTIC"])
        if RANK == 1 and LIFE == 0:
            wait_for(life_file(0, 0))
            die()
        wait_for(life_file(1, 1))
    """
    ended = run(elastic(script), "--elastic", "1", "--log-dir", "logs")
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [f"worker 1 failed: {KILLED}; training continues without it; restart in 1 s"]
    first, second = ended.of(1)
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:], "the same address"
    assert first.endswith(" 0 1")
    assert len(ended.of(0)) == 1
    assert (tmp_path / "logs" / "rank-1.log").read_text() == f"{first}\n{second}\n"


def test_workers_that_exit_leave_or_freeze_are_restarted(run):
    script = """
        if RANK == 1 and LIFE == 0:
            os._exit(75)
        if RANK == 1 and LIFE == 1:
            os._exit(5)
        if RANK == 2 and LIFE == 0:
            wait_for(life_file(1, 2))
            beat(step=4)
            hang()
        wait_for(life_file(1, 2)), wait_for(life_file(2, 1))
    """
    ended = run(elastic(script), "--elastic", "1", "--heartbeat-timeout", "1", workers=3)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 left, as it was asked to: exit code 75; training continues without it; restart in 1 s",
        "worker 1 failed: exit code 5; training continues without it; restart in 2 s",
    ]
    assert lines_of(ended, "worker 2") == [
        "worker 2 failed: frozen: no heartbeat for 1 s (last step 4); training continues without it; restart in 1 s"
    ]


def test_worker_that_takes_long_to_exit_after_an_error_is_killed(run):
    script = """
        if RANK == 1 and LIFE == 0:
            beat(error={"type": "KeyError", "message": "x"})
            hang()
        wait_for(life_file(1, 1))
    """
    ended = run(elastic(script), "--elastic", "1", "--grace", "0.5", "--heartbeat-timeout", "0")
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: an error, while it was still shutting down; training continues without it; restart in 1 s"
    ]


def test_too_few_workers(run):
    script = """
        wait_for(life_file(1, 0)), wait_for(life_file(2, 0))
        if LIFE == 0 and RANK == 1:
            print("last words")
            os._exit(5)
        if RANK == 2:
            wait_ended(life_file(1, 0))
            os._exit(6)
        hang()
    """
    ended = run(elastic(script), "--elastic", "2", workers=3)
    assert ended.code == 5
    too_few = "the attempt ends: 1 worker left of at least 2 (--elastic)"
    assert lines_of(ended, "worker 2")[0] == f"worker 2 failed: exit code 6; {too_few}"
    assert "worker 2 ended after that: exit code 6" in ended.said
    assert ended.said[-2:] == ["worker 1 failed first: exit code 5. Its last lines:", "  | last words"]


def test_step_that_fails_on_everybody_ends_the_attempt(run, tmp_path):
    """Also if the first one has been restarted when the last one fails."""
    script = """
        if ATTEMPT == 1:
            sys.exit()
        if LIFE:
            hang()
        beat(step=7)
        if RANK == 1:
            wait_for(life_file(0, 1))
        if RANK == 2:
            wait_ended(life_file(1, 0))
        wait_for(life_file(2, 0))
        os._exit(5 + RANK)
    """
    ended = run(elastic(script), "--elastic", "1", "--max-restarts", "1", "--restart-delay", "0", workers=3)
    assert ended.code == 0
    too_few = "the attempt ends: 0 workers left of at least 1 (--elastic)"
    assert lines_of(ended, "worker 2")[0] == f"worker 2 failed: exit code 7; {too_few}"
    assert "worker 0 failed first: exit code 5. It printed nothing." in ended.said
    assert "restart 1 of 1 at once with 3 workers" in ended.said
    assert not list(tmp_path.glob("*-life-2"))


def test_root_cause_may_follow_the_worker_that_lost_its_peer(run):
    script = """
        if RANK == 0:
            print("WorkerLostError: Worker 1 is lost.")
            os._exit(1)
        wait_ended(life_file(0, 0))
        time.sleep(0.5)  # time in which it would be signalled
        os._exit(7)
    """
    ended = run(elastic(script), "--elastic", "2", "--grace", "60")
    assert ended.code == 7
    assert ended.said[-1] == "worker 1 failed first: exit code 7. It printed nothing."


def test_limit_of_worker_restarts(run):
    script = """
        if RANK == 1:
            os._exit(5)
        wait_for(life_file(1, 1)), wait_ended(life_file(1, 1))
    """
    ended = run(elastic(script), "--elastic", "1", "--worker-restarts", "1")
    assert ended.code == 0
    assert lines_of(ended, "worker 1")[1] == "worker 1 failed: exit code 5; not restarted (--worker-restarts 1)"


def test_nobody_is_restarted_once_a_worker_has_ended_with_0(run, tmp_path):
    script = (
        DIES_THREE_TIMES
        + """
note("up-0")
if RANK == 0:
    wait_for(life_file(1, 2))
    wait_ended(life_file(1, 2))
"""
    )
    ended = run(elastic(script), "--elastic", "1")
    assert ended.code == 0
    assert ended.said[-1] == "worker 1 is not restarted: worker 0 has ended with exit code 0"
    assert not (tmp_path / "pid-0-of-1-life-3").exists()


def test_worker_that_waits_to_join_is_ended_after_the_others(run):
    ended = run(elastic(WAITS_TO_JOIN), "--elastic", "1", "--grace", "0.5", "--heartbeat-timeout", "0")
    assert ended.code == 0
    assert ended.said[-1] == "worker 1 ended: killed by SIGTERM; the training has ended without it"


def test_worker_that_has_joined_is_not_ended_by_the_others(run):
    script = """
        if RANK == 1 and LIFE == 0:
            wait_for(life_file(0, 0))
            die()
        if RANK == 1:
            beat(membership={"lost": 0, "joined": 1, "repeated_steps": 0, "seconds_lost": 0.0})
            note("joined")
            wait_ended(life_file(0, 0))
            time.sleep(2)  # longer than the grace, twice
            print("through")
        wait_for("joined")
    """
    ended = run(elastic(script), "--elastic", "1", "--grace", "0.5", "--heartbeat-timeout", "0")
    assert (ended.code, ended.of(1)) == (0, ["through"])


def test_worker_that_fails_after_another_has_ended_with_0(run):
    ended = run(elastic("if RANK: wait_ended(life_file(0, 0)); os._exit(4)"), "--elastic", "1")
    assert ended.code == 4
    assert ended.said[-1] == "worker 1 failed first: exit code 4. It printed nothing."


def test_signal_while_a_worker_is_away(start):
    script = (
        DIES_THREE_TIMES
        + """
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
note("up-0")
if RANK == 0:
    wait_for(life_file(1, 2))
    wait_ended(life_file(1, 2))
    note("away")
hang()
"""
    )
    run = start(elastic(script), "--elastic", "1", "--max-restarts", "1")
    run.wait_for("away")
    run.process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 75
    assert ended.said[-1] == "preempted: all workers saved and exited (exit code 75)"


def test_others_save_if_too_few_are_left_because_one_was_asked_to_leave(run):
    script = """
        def save(*_):
            time.sleep(1)  # longer than after a failure
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        note(f"up-{RANK}")
        wait_for("up-0")
        if RANK == 1 and ATTEMPT == 0:
            os._exit(75)
        if ATTEMPT == 0:
            hang()
    """
    options = ("--elastic", "2", "--max-restarts", "1", "--restart-delay", "0")
    ended = run(elastic(script), *options)
    assert ended.code == 0
    assert "all workers saved and exited, although this command received no signal" in ended.said


def test_workers_start_and_leave_on_request(start, state, tmp_path):
    """The others do not notice; who leaves is not restarted, and who starts joins them at its own address."""
    script = """
        def leave(*_):
            if LIFE == 0:
                note("leaves")
                wait_for("may-leave")
            os._exit(75)
        signal.signal(signal.SIGTERM, leave)
        if LIFE == 0:
            print(os.environ["TF_CONFIG"], os.environ["TFDIST_ELASTIC_WORKERS"])
        if RANK < 2:
            wait_for("go")
        elif LIFE < 2:
            beat(membership={"lost": 0, "joined": 1, "repeated_steps": 0, "seconds_lost": 0.0, "training": 3})
            note(f"joined-{LIFE}")
            hang()
    """
    options = ("--elastic", "1:3", "--control-socket", "run.sock", "--worker-restarts", "0")
    run = start(elastic(script), *options)
    run.wait_for(*[f"pid-0-of-{rank}-life-0" for rank in (0, 1)])
    socket = tmp_path / "run.sock"
    with pytest.raises(UsageError, match="out of range. Received: 4. Expected: 1 to 3"):
        request(socket, {"workers": 4})
    with pytest.raises(UsageError, match="not begun. Received: 1 worker. Expected: at least 2, .* wait for one"):
        request(socket, {"workers": 1})
    assert request(socket, {"workers": 3}) == "3 workers from now on: worker 2 starts"
    run.wait_for("joined-0")
    assert request(socket, {"workers": 2}) == "2 workers from now on: worker 2 leaves"
    run.wait_for("leaves")
    assert request(socket, {"workers": 3}) == "3 workers from now on: worker 2 starts"
    (tmp_path / "may-leave").touch()
    run.wait_for("joined-1")
    assert request(socket, {"workers": 2}) == "2 workers from now on: worker 2 leaves"
    run.until(lambda: state(int((tmp_path / "pid-0-of-2-life-1").read_text())) == "", "the worker has left")
    assert request(socket, {"workers": 2}) == "2 workers from now on: as before"
    (tmp_path / "go").touch()
    ended = run.end()
    assert ended.code == 0
    assert lines_of(ended, "worker 2") == [
        "worker 2 has joined the others",
        "worker 2 left, as it was asked to: exit code 75; it starts again, as requested",
        "worker 2 has joined the others",
        "worker 2 left, as it was asked to: exit code 75; it is not restarted",
    ]
    configs = [json.loads(line.rsplit(" ", 1)[0]) for rank in range(3) for line in ended.of(rank)]
    assert [config["task"]["index"] for config in configs] == [0, 1, 2]
    assert all(len(config["cluster"]["worker"]) == 3 for config in configs)
    assert all(line.endswith(" 2") for rank in range(3) for line in ended.of(rank))
    assert not socket.exists()


def test_last_line_has_losses_and_joins_of_all_attempts(run):
    script = """
        totals = {"lost": 1 + RANK, "joined": RANK, "repeated_steps": 3 - RANK, "seconds_lost": 0.3}
        beat(step=ATTEMPT, membership=totals)
        note(f"sent-{ATTEMPT}-{RANK}")
        wait_for(f"sent-{ATTEMPT}-0"), wait_for(f"sent-{ATTEMPT}-1")
        if ATTEMPT == 0:
            os._exit(5)
    """
    options = ("--max-restarts", "1", "--restart-delay", "0")
    ended = run(elastic(script), "--elastic", "2", *options)
    assert ended.code == 0
    assert ended.said[-1] == "4 workers lost, 2 joined; 6 steps computed again, 0.6 s lost"
    assert not any("joined" in line for line in run(elastic(script), *options).said)
