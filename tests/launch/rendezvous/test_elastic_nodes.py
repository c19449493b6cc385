"""`tfdist run --nodes --elastic`: each node restarts its own workers, and the others train on without a lost node."""

import pathlib
import signal
import textwrap

import pytest
from coordinator_hosts import Hosts
from node_runs import HOST, NO_DELAY, says, says_lost
from test_elastic_runs import KILLED, LIVES, WAITS_TO_JOIN

from tfdist.launch.run_spec import RunSpec


def count(hosts, rank, number, *, has_failure=True, attempt=0):
    hosts.tell(rank, "training", attempt=attempt, count=number, has_failure=has_failure)


def changes(hosts, rank):
    return [(told["too_few"], told["has_completed"]) for told in hosts.connections[rank].take("elastic")]


def test_workers_of_all_nodes_are_counted():
    hosts = Hosts(elastic=3, max_restarts=0).start(w0=2, w1=2)
    count(hosts, 1, 1)
    hosts.look(30.0)
    assert not hosts.orders(0) and not changes(hosts, 0)
    count(hosts, 1, 2)
    count(hosts, 0, 1)
    count(hosts, 1, 1)
    too_few = "2 workers left of at least 3 (--elastic)"
    assert changes(hosts, 0) == changes(hosts, 1) == [(too_few, False)]
    hosts.tell(0, "failed", attempt=0, text=too_few)
    assert hosts.orders(1) == [(too_few, None, False)]
    hosts.done(1, -15, -15, signalled=True)
    hosts.done(0, 5, left_out=[1])
    (over,) = hosts.connections[0].take("run_over")
    assert over["code"] == 5 and over["lines"][-1].startswith("worker 0 on h0 failed first: exit code 5")


@pytest.mark.parametrize("has_failure", [False, True])
def test_too_few_without_a_cause_of_their_own(has_failure):
    """The nodes report no other one: all have left, or have only lost others. Those that have left may save."""
    hosts = Hosts(elastic=2, max_restarts=0).start()
    count(hosts, 1, 0, has_failure=has_failure)
    hosts.look(4.5)
    assert not hosts.connections[0].take("shut_down")
    hosts.look(0.5)
    (order,) = hosts.connections[0].take("shut_down")
    assert (order["reason"], order["must_save"]) == ("1 worker left of at least 2 (--elastic)", not has_failure)
    hosts.done(1, 75)
    hosts.done(0, 75, signalled=True)
    assert hosts.over() == 75


def test_training_continues_without_a_lost_node_and_takes_it_back():
    hosts = Hosts(nodes=3, elastic=2).start(w1=2)
    hosts.connections[0].take("notice")
    first = {rank: connection.take("start")[0] for rank, connection in hosts.connections.items()}
    assert not first[1]["joins_late"] and first[1]["is_elastic"]
    hosts.lose(1)
    hosts.look(30.0)
    (notice,) = hosts.connections[0].take("notice")
    assert notice["text"] == "node 1 (h1) was lost: gone; training continues without worker 1, worker 2"
    assert not hosts.orders(0)
    (again,) = hosts.join(1, workers=2).take("start")
    assert again == {**first[1], "joins_late": True}
    for rank in (0, 1, 2):
        hosts.tell(rank, "completed", attempt=0)
    hosts.done(0, 0)
    hosts.done(2, 0)
    assert not hosts.connections[0].take("run_over"), "it waits for the node that has returned"
    hosts.done(1, 0, 0)
    assert hosts.over() == 0


def test_a_node_that_returned_does_not_count_before_its_workers_train():
    hosts = Hosts(elastic=1).start()
    hosts.lose(1)
    hosts.join(1)
    count(hosts, 0, 0)
    assert changes(hosts, 0) == [("0 workers left of at least 1 (--elastic)", False)]
    hosts = Hosts(elastic=1).start()
    hosts.lose(1)
    hosts.join(1)
    count(hosts, 1, 1)
    count(hosts, 0, 0)
    assert not changes(hosts, 0)


def test_loss_of_a_node_that_leaves_too_few_ends_the_attempt():
    hosts = Hosts(elastic=2, max_restarts=0).start()
    hosts.lose(1)
    lost = "node 1 (h1) was lost: gone; 1 worker left of at least 2 (--elastic)"
    assert hosts.orders(0) == [(lost, None, False)]
    hosts.done(0, -15, signalled=True)
    (over,) = hosts.connections[0].take("run_over")
    assert (over["code"], over["lines"][-1]) == (1, f"the attempt failed: {lost}")


def test_nobody_joins_once_a_worker_has_ended_with_0():
    hosts = Hosts(nodes=3, elastic=1).start()
    hosts.lose(2)
    hosts.tell(0, "completed", attempt=0)
    assert changes(hosts, 1) == [("", True)]
    connection = hosts.join(2)
    assert not connection.take("start")
    assert connection.take("notice")[-1]["text"].endswith("takes part from the next restart")
    hosts.done(0, 0)
    hosts.done(1, 0)
    assert hosts.over() == hosts.over(2) == 0


def test_a_node_that_is_lost_once_a_worker_has_ended_with_0_is_a_failure():
    hosts = Hosts(elastic=1, max_restarts=0).start()
    hosts.tell(0, "completed", attempt=0)
    hosts.lose(1)
    hosts.done(0, 0)
    assert hosts.over() == 1


def test_workers_that_saved_without_those_of_a_lost_node():
    hosts = Hosts(elastic=1).start()
    hosts.lose(1)
    hosts.tell(0, "stop", signal=15, again=False)
    hosts.done(0, 75, signalled=True)
    assert hosts.over() == 75


def test_minimum_of_more_workers_than_there_are():
    hosts = Hosts(elastic=3).start()
    (over,) = hosts.connections[1].take("run_over")
    assert over["code"] == 2
    assert over["lines"] == [
        "error: --elastic exceeds --workers. Received: --elastic 3. Expected: at most 2, the workers of all hosts. "
        "Correct one of them."
    ]


def test_hosts_agree_on_the_minimum():
    hosts = Hosts(elastic=2)
    hosts.join(0)
    (answer,) = hosts.join(1, options=RunSpec(nodes=2, max_restarts=3).common_options).take("rejected")
    assert answer["reason"].startswith("Received: --elastic (none). Expected: --elastic 2, as on node 0")


@pytest.fixture
def elastic(node):
    """`elastic(rank, script, *options)`: one of two nodes, with a worker each."""
    return lambda rank, script, *options, **more: node(
        rank, LIVES + textwrap.dedent(script), "--elastic", "1", *options, **more
    )


JOINED = 'beat(membership={"lost": 0, "joined": 1, "repeated_steps": 0, "seconds_lost": 0.0})'


@pytest.mark.long
def test_a_worker_is_restarted_alone_and_a_killed_node_joins_the_attempt(elastic, tmp_path):
    script = f"""
        say(LIFE, ATTEMPT, os.environ["TFDIST_RUN_ID"], os.environ["TFDIST_TOKEN"], os.environ["TF_CONFIG"])
        if RANK == 1 and LIFE == 0:
            wait_for(life_file(0, 0))
            die()
        if RANK == 1 and LIFE == 1:
            {JOINED}
            note("second-life")
            hang()
        if RANK == 1:
            {JOINED}
            note("third-life")
            wait_ended(life_file(0, 0))
        wait_for("third-life")
    """
    first, second = (elastic(rank, script, "--log-dir", "logs") for rank in (0, 1))
    first.wait_for("second-life")
    log = tmp_path / "logs" / "rank-1.log"
    first.until(lambda: "\n1 " in log.read_text(), "the log")
    second.process.kill()
    second.process.communicate()
    again = elastic(1, script, "--log-dir", "logs")
    ended = [first.end(), again.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert says_lost(ended[0], f"node 1 ({HOST}) was lost: {{}}; training continues without worker 1")
    assert says(ended[0], f"node 1 ({HOST}) takes part in attempt 0 again")
    assert says(ended[1], "worker 1 has joined the others")
    lives = [line.split(" ", 1) for line in log.read_text().splitlines()]
    lives = [life for life in lives if life[0] in ("0", "1", "2")]
    assert [number for number, _ in lives] == ["0", "1", "2"]
    assert lives[0][1] == lives[1][1] == lives[2][1], "the same attempt, run, token and addresses"
    assert len(ended[0].of(0)) == 1


@pytest.mark.long
def test_too_few_on_all_nodes_restart_all(elastic):
    script = """
        beat(step=1)
        if ATTEMPT == 1:
            sys.exit()
        wait_for(life_file(1 - RANK, 0))
        if RANK:
            wait_ended(life_file(0, 0))
        os._exit(5 + RANK)
    """
    options = ("--max-restarts", "1", "--heartbeat-timeout", "0", *NO_DELAY)
    ended = [run.end() for run in [elastic(rank, script, *options) for rank in (0, 1)]]
    assert [one.code for one in ended] == [0, 0], ended
    assert all(says(one, f"worker 0 on {HOST} failed first: exit code 5") for one in ended)
    assert all(says(one, "restart 1 of 1 at once with 2 workers") for one in ended)


@pytest.mark.long
def test_a_worker_that_waits_to_join_is_ended_after_those_of_other_nodes(elastic):
    options = ("--grace", "0.5", "--heartbeat-timeout", "0")
    ended = [run.end() for run in [elastic(rank, WAITS_TO_JOIN, *options) for rank in (0, 1)]]
    assert [one.code for one in ended] == [0, 0], ended
    assert says(ended[1], f"worker 1 failed: {KILLED}; training continues without it; restart in 1 s")
    assert ended[1].said[-1] == "worker 1 ended: killed by SIGTERM; the training has ended without it"


@pytest.mark.long
def test_a_pending_restart_is_cancelled_when_workers_of_other_nodes_have_ended(elastic, tmp_path):
    script = """
        if RANK == 1 and LIFE < 3:
            wait_for("up-0")
            die()
        note("up-0")
        wait_for(life_file(1, 2)), wait_ended(life_file(1, 2))
    """
    ended = [run.end() for run in [elastic(rank, script) for rank in (0, 1)]]
    assert [one.code for one in ended] == [0, 0], ended
    assert says(ended[1], "worker 1 is not restarted: a worker of another host has ended with exit code 0")
    assert not (tmp_path / "pid-0-of-1-life-3").exists()


def running(hosts, start, training=1):
    kept = {name: value for name, value in start.items() if name not in ("ranks", "joins_late")}
    return {"running": {"start": kept, "training": training}}


def started_again(before, **options):
    """A new coordinator in place of one that is lost, and the messages that had started the nodes."""
    starts = {rank: connection.take("start")[-1] for rank, connection in before.connections.items()}
    return Hosts(**options), starts


def test_a_new_coordinator_continues_the_attempt_that_nodes_run():
    before = Hosts(nodes=3, elastic=2).start(w0=2)
    hosts, starts = started_again(before, nodes=3, elastic=2, run_id="new")
    hosts.join(0, workers=2)
    hosts.join(2, **running(hosts, starts[2]))
    assert not hosts.connections[2].take("start"), "its workers run"
    (start,) = hosts.connections[0].take("start")
    assert start == {**starts[0], "joins_late": True}
    assert (start["run"], start["ranks"]) == ("f00d", [0, 1])
    hosts.look(29.0)
    assert not hosts.orders(2), "node 1 may not have found the new coordinator yet"
    hosts.join(1, **running(hosts, starts[1]))
    assert not hosts.connections[1].take("start")
    hosts.look(30.0)
    assert not hosts.orders(2) and not changes(hosts, 2)
    for rank, codes in ((2, [0]), (1, [0]), (0, [0, 0])):
        hosts.tell(rank, "completed", attempt=0)
        hosts.done(rank, *codes)
    assert hosts.over() == hosts.over(1) == 0


def test_workers_are_counted_when_nodes_have_had_time_to_find_a_new_coordinator():
    before = Hosts(nodes=3, elastic=2).start()
    hosts, starts = started_again(before, nodes=3, elastic=2)
    hosts.join(0)
    hosts.join(2, **running(hosts, starts[2]))
    hosts.look(30.5)
    assert changes(hosts, 2) == [("1 worker left of at least 2 (--elastic)", False)]


def test_a_node_that_was_cut_off_from_the_coordinator_is_taken_back_with_its_workers():
    hosts = Hosts(elastic=1, max_restarts=0).start()
    (start,) = hosts.connections[1].take("start")
    hosts.lose(1)
    hosts.join(1, **running(hosts, start))
    assert not hosts.connections[1].take("start")
    hosts.tell(0, "training", attempt=0, count=0, has_failure=True)
    assert not changes(hosts, 0), "that of the other node trains"
    hosts.lose(1)
    assert hosts.orders(0)


def test_a_silent_node_is_waited_for_while_no_worker_of_the_others_trains():
    """The coordinator is on the side of the worker that may not continue."""
    hosts = Hosts(elastic=2, max_restarts=0).start(w1=2)
    (start,) = hosts.connections[1].take("start")
    hosts.cut_off(1)
    assert not hosts.orders(0)
    count(hosts, 0, 0)
    hosts.look(50.0)
    assert not hosts.orders(0) and not changes(hosts, 0)
    hosts.join(1, workers=2, **running(hosts, start, training=2))
    hosts.look(60.0)
    assert not hosts.orders(0) and not changes(hosts, 0)
    hosts.cut_off(1)
    hosts.look(60.5)
    assert changes(hosts, 0) == [("0 workers left of at least 2 (--elastic)", False)]


def test_workers_are_counted_when_those_that_are_left_have_had_time_to_decide_without_a_silent_node():
    hosts = Hosts(elastic=2, max_restarts=0).start(w1=2)
    hosts.cut_off(1)
    hosts.look(29.0)
    assert not hosts.orders(0)
    hosts.look(1.5)
    assert changes(hosts, 0) == [("1 worker left of at least 2 (--elastic)", False)]


def test_a_node_that_was_cut_off_when_a_worker_ended_with_0_gets_to_know_it():
    hosts = Hosts(nodes=3, elastic=1).start()
    (start,) = hosts.connections[2].take("start")
    hosts.lose(2)
    hosts.tell(0, "completed", attempt=0)
    kinds = [message["type"] for message in hosts.join(2, **running(hosts, start)).sent]
    assert kinds.index("joined") < kinds.index("elastic")
    assert changes(hosts, 2) == [("", True)]
    assert changes(hosts, 1) == [("", True)], "told once"


def test_a_node_whose_workers_the_others_do_not_expect_is_rejected():
    hosts = Hosts(elastic=1).start()
    (start,) = hosts.connections[1].take("start")
    hosts.lose(1)
    hosts.tell(0, "failed", attempt=0, text="exit code 1")
    for changed in ({}, {"run": "other"}, {"attempt": 7}):
        (answer,) = hosts.join(1, **running(hosts, {**start, **changed})).take("rejected")
        assert answer["is_final"] and "They have continued without it" in answer["reason"]
    assert hosts.coordinator._membership.missing == [1]


def test_a_new_coordinator_does_not_continue_an_attempt_at_another_address():
    before = Hosts(elastic=1).start()
    hosts, starts = started_again(before, elastic=1)
    hosts.join(0)
    (answer,) = hosts.join(1, address="127.0.0.9", **running(hosts, starts[1])).take("rejected")
    assert answer["is_final"]
    with pytest.raises(KeyError):
        hosts.join(1, running={"training": 1})
    hosts.look(1.0)
    assert hosts.coordinator._membership.missing == [1] and not hosts.connections[0].take("start")


def test_loss_of_the_supervisor_of_node_0_ends_nothing_if_the_coordinator_is_left():
    hosts = Hosts(elastic=1).start()
    hosts.lose(0)
    assert not hosts.orders(1) and not hosts.connections[1].take("run_over")


def test_killed_node_0_joins_the_attempt_that_the_other_one_has_continued(elastic, tmp_path):
    script = f"""
        say(LIFE, ATTEMPT, os.environ["TFDIST_RUN_ID"], os.environ["TFDIST_TOKEN"], os.environ["TF_CONFIG"])
        if RANK == 0 and LIFE == 0:
            hang()
        if RANK == 0:
            {JOINED}
            note("second-life")
        if RANK == 1 and LIFE == 0:
            wait_for("die")
            die()
        wait_for("second-life"), wait_for(life_file(1, 1))
    """
    options = ("--log-dir", "logs", "--seed", "3")
    first, second = (elastic(rank, script, *options) for rank in (0, 1))
    second.wait_for("pid-0-of-1-life-0")
    log = tmp_path / "logs" / "rank-0.log"
    second.until(lambda: log.exists() and "\n" in log.read_text(), "the log")
    first.process.kill()
    first.process.communicate()
    again = elastic(0, script, *options)
    again.wait_for("second-life")
    (tmp_path / "die").touch()  # the new coordinator knows that node 1 has lost its worker, and restarts it
    ended = [again.end(), second.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert says_lost(ended[1], "the rendezvous was lost ({}): the workers of this host train on; it joins again when")
    assert says(ended[0], f"node 1 ({HOST}) runs attempt 0, which continues")
    assert says(ended[1], f"node 0 ({HOST}) takes part in attempt 0 again")
    lives = [line.split(" ", 1) for line in log.read_text().splitlines()]
    first_life, second_life = [life for life in lives if life[0] in ("0", "1")]
    assert first_life[1] == second_life[1], "the same attempt, run, token and addresses"


def wait_until_alone(run):
    line = b"?"
    while line and b"the workers of this host train on" not in line:
        line = run.process.stderr.readline()
    assert line


@pytest.mark.long
def test_node_0_is_lost_while_another_one_waits_for_its_end(elastic):
    script = """
        if RANK == 0:
            wait_for(life_file(1, 0))
            note("up")
            hang()
    """
    first, second = (elastic(rank, script) for rank in (0, 1))
    second.wait_for("up", "pid-0-of-1-life-0")
    second.until(lambda: not _lives(second, "pid-0-of-1-life-0"), "the end of worker 1")
    first.process.kill()
    first.process.communicate()
    ended = second.end()
    assert ended.code == 0, ended


def _without_node_0(first, second):
    """Returns how node 1 ends that goes on when it has lost node 0."""
    first.process.kill()
    first.process.communicate()
    wait_until_alone(second)
    (second._here / "go").touch()
    return second.end()


def _lives(run, name):
    return (pathlib.Path("/proc") / (run._here / name).read_text()).exists()


@pytest.mark.long
def test_the_run_ends_without_node_0(elastic):
    script = """
        note(f"up-{RANK}")
        if RANK == 0:
            hang()
        wait_for("go")
        os._exit(CODE)
    """
    for code, max_restarts, expected in ((0, "1", 0), (5, "0", 5), (5, "1", 69)):
        options = ("--max-restarts", max_restarts, "--worker-restarts", "0", "--start-timeout", "1")
        text = textwrap.dedent(script).replace("CODE", str(code))
        first, second = (elastic(rank, text, *options) for rank in (0, 1))
        second.wait_for("up-0", "up-1")
        ended = _without_node_0(first, second)
        assert ended.code == expected, ended
        for path in second._here.glob("*"):
            if path.name not in ("worker.py", "script.py"):
                path.unlink()


@pytest.mark.long
def test_too_few_without_node_0(elastic):
    script = """
        note(f"up-{RANK}")
        if RANK:
            wait_for("go")
            beat(membership={"lost": 2, "joined": 0, "repeated_steps": 0, "seconds_lost": 0.0, "training": 0})
        hang()
    """
    first, second = (elastic(rank, script) for rank in (0, 1))
    second.wait_for("up-0", "up-1")
    ended = _without_node_0(first, second)
    assert ended.code == 1, ended
    assert says(ended, "ending the workers: 0 workers left of at least 1 (--elastic)")


@pytest.mark.long
def test_a_supervisor_that_was_stopped_joins_again_with_its_workers(elastic):
    script = """
        note(f"up-{RANK}")
        wait_for("go")
    """
    options = ("--heartbeat-timeout", "2")
    first, second = (elastic(rank, script, *options) for rank in (0, 1))
    second.wait_for("up-0", "up-1")
    second.process.send_signal(signal.SIGSTOP)
    said = b""
    while b"training continues without worker 1" not in said:
        said = first.process.stderr.readline()
        assert said
    second.process.send_signal(signal.SIGCONT)
    while b"takes part in attempt 0 again" not in said:
        said = first.process.stderr.readline()
        assert said
    (first._here / "go").touch()
    ended = [first.end(), second.end()]
    assert [one.code for one in ended] == [0, 0], ended
