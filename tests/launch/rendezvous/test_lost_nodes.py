"""Runs over two hosts, one of which is lost."""

import signal

from node_runs import HOST, NO_DELAY, says, says_lost


def test_killed_supervisor_joins_again(node, tmp_path):
    script = """
        say("in attempt", ATTEMPT)
        note(f"up-{RANK}-of-{ATTEMPT}")
        if ATTEMPT == 0:
            beat(step=1)
            hang()
    """
    options = ("--max-restarts", "1", "--log-dir", "logs", *NO_DELAY)
    first, second = (node(rank, script, *options) for rank in (0, 1))
    first.wait_for("up-0-of-0", "up-1-of-0")
    log = tmp_path / "logs" / "rank-1.log"
    first.until(lambda: log.read_text() == "in attempt 0\n", "the log")
    second.process.kill()
    second.process.communicate()
    again = node(1, script, *options)
    ended = [first.end(), again.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert says_lost(ended[0], f"ending the workers: node 1 ({HOST}) was lost: {{}}")
    assert says_lost(ended[0], f"the attempt failed: node 1 ({HOST}) was lost: {{}}")
    assert {"pid-0-of-attempt-1", "pid-1-of-attempt-1"} <= set(first.pids())
    assert [line for line in log.read_text().splitlines() if line.startswith("in")] == ["in attempt 0", "in attempt 1"]


def test_lost_host_that_does_not_join_again(node):
    script = "beat(step=1); note(f'up-{RANK}'); hang()"
    options = ("--max-restarts", "1", "--rejoin-timeout", "0", *NO_DELAY)
    first, second = (node(rank, script, *options) for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    second.process.kill()
    second.process.communicate()
    ended = first.end()
    assert ended.code == 69
    assert ended.said[-1] == "not started: node 1 did not join again within 0 s"


def test_lost_host_without_restarts_ends_the_run(node):
    first, second = (node(rank, "note(f'up-{RANK}'); hang()") for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    second.process.kill()
    second.process.communicate()
    ended = first.end()
    assert ended.code == 1
    assert says(ended, f"the attempt failed: node 1 ({HOST}) was lost")


def test_lost_rendezvous(node):
    """The end of node 0 ends the run; the others exit with another code."""
    first, second = (node(rank, "note(f'up-{RANK}'); hang()", "--max-restarts", "3") for rank in (0, 1))
    second.wait_for("up-0", "up-1")
    first.process.kill()
    first.process.communicate()
    ended = second.end()
    assert ended.code == 69
    # The coordinator may have time to say why.
    lost = "the rendezvous was lost ({}): this host ends its workers (exit code 69)"
    assert says_lost(ended, lost) or says(ended, "the run ends because the coordinator runs there")


def test_stopped_supervisor_is_lost(node):
    script = "note(f'up-{RANK}'); hang()"
    first, second = (node(rank, script, "--heartbeat-timeout", "4") for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    second.process.send_signal(signal.SIGSTOP)
    ended = first.end()
    assert ended.code == 1
    assert says(ended, f"the attempt failed: node 1 ({HOST}) was lost: no heartbeat for 4 s")
    second.process.send_signal(signal.SIGCONT)
    assert second.end().code == 69


def test_stopped_supervisor_of_node_0_ends_the_run(node):
    first, second = (node(rank, "note(f'up-{RANK}'); hang()", "--heartbeat-timeout", "4") for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    first.process.send_signal(signal.SIGSTOP)
    ended = second.end()
    assert ended.code == 69
    assert says(
        ended, f"node 0 ({HOST}) was lost: no heartbeat for 4 s; the run ends because the coordinator runs there"
    )
    first.process.send_signal(signal.SIGCONT)
    assert first.end().code == 69


def test_fewer_hosts_continue_and_a_host_joins_again(node):
    script = """
        say(ATTEMPT, len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]), os.environ["TFDIST_FULL_WORKERS"])
        beat(step=ATTEMPT)
        note(f"up-{RANK}-of-{ATTEMPT}")
        if ATTEMPT == 1:
            wait_for("go")
            die()
        if ATTEMPT < 2:
            hang()
    """
    options = ("--max-restarts", "3", "--min-workers", "1", *NO_DELAY)
    first, second = (node(rank, script, *options) for rank in (0, 1))
    first.wait_for("up-0-of-0", "up-1-of-0")
    second.process.kill()
    second.process.communicate()
    first.wait_for("up-0-of-1")
    again = node(1, script, *options)
    said = []
    while not said or b"attempt 1 is running" not in said[-1]:
        said.append(again.process.stderr.readline())
        assert said[-1], said
    (first._here / "go").touch()
    ended = [first.end(), again.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert ended[0].of(0) == ["0 2 2", "1 1 2", "2 2 2"]
    assert ended[1].of(1) == ["2 2 2"]
    assert says(ended[0], "restart 1 of 3 at once with 1 worker, 1 fewer than requested")
