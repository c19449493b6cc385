"""Runs over two hosts, both on this one: two launchers that meet on loopback."""

import json
import signal
import socket

import pytest

HOST = socket.gethostname()
NO_DELAY = ("--restart-delay", "0")


@pytest.fixture
def both(node):
    """Runs two hosts to the end."""

    def run(script, *options, **more):
        runs = [node(rank, script, *options, **more) for rank in (0, 1)]
        return [run.end() for run in runs]

    return run


def says(ended, text):
    return any(text in line for line in ended.said)


def test_all_workers_of_all_hosts_form_one_cluster(node):
    script = """
        print(os.environ["TF_CONFIG"])
        print(os.environ["TFDIST_RUN_ID"], ATTEMPT, os.environ["TFDIST_FULL_WORKERS"], "TFDIST_TOKEN" in os.environ)
    """
    runs = [node(0, script), node(1, script, workers=2)]
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [0, 0], ended
    lines = [ended[0].of(0), ended[1].of(1), ended[1].of(2)]
    configs = [json.loads(config) for config, _ in lines]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3 and all(address.startswith("127.0.0.1:") for address in addresses)
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len({line for _, line in lines}) == 1
    assert lines[0][1].endswith(" 0 3 False")


def test_first_cause_is_told_on_all_hosts(both, tmp_path):
    script = """
        if RANK == 0:
            hang()
        wait_for("pid-0")
        print("the reason")
        sys.exit(3)
    """
    ended = both(script, "--error-file", "error-$RANK.json")
    assert [one.code for one in ended] == [3, 3]
    for one in ended:
        report = one.said[one.said.index(f"worker 1 on {HOST} failed first: exit code 3. Its last lines:") :]
        assert report == [report[0], "  | the reason"]
    assert says(ended[0], "ending the workers: worker 1: exit code 3")
    assert says(ended[0], f"worker 0 on {HOST} ended after that: killed by SIGTERM")


def test_error_files_name_the_host(node, tmp_path):
    script = "hang() if RANK == 0 else (wait_for('pid-0'), print('the reason'), sys.exit(3))"
    runs = [node(rank, script, "--error-file", f"error-{rank}.json") for rank in (0, 1)]
    assert [run.end().code for run in runs] == [3, 3]
    entries = [json.loads((tmp_path / f"error-{rank}.json").read_text()) for rank in (0, 1)]
    for entry in entries:
        cause = entry["cause"]
        assert (cause["rank"], cause["host"], cause["exit_code"], cause["last_lines"]) == (1, HOST, 3, ["the reason"])
        assert (entry["workers"], entry["attempt"], entry["host"]) == (2, 0, HOST)
        assert [end["rank"] for end in entry["ends"]] == [1, 0]
    assert entries[0]["run"] == entries[1]["run"]


ECHO = "print('Traceback (most recent call last):'); print('UnavailableError: Socket closed'); sys.exit(1)"


def test_echo_on_another_host_does_not_win(both):
    script = f"""
        if RANK == 0:
            {ECHO}
        wait_gone(0)
        time.sleep(0.5)  # time in which the echo would win
        sys.exit(4)
    """
    ended = both(script)
    assert [one.code for one in ended] == [4, 4], ended
    assert all(says(one, f"worker 1 on {HOST} failed first: exit code 4") for one in ended)


def test_echo_is_the_cause_where_nothing_else_is_found(both):
    ended = both(f"hang() if RANK else None; {ECHO}", "--grace", "0.3")
    assert [one.code for one in ended] == [1, 1]
    assert all(says(one, f"worker 0 on {HOST} failed first: exit code 1") for one in ended)


def test_echo_waits_for_a_frozen_worker_on_another_host(both):
    script = f"""
        if RANK == 0:
            wait_for("stopped")
            {ECHO}
        beat(step=1)
        note("stopped")
        die("SIGSTOP")
    """
    ended = both(script, "--grace", "1.5", "--heartbeat-timeout", "5")
    assert [one.code for one in ended] == [137, 137], ended
    assert all(says(one, f"worker 1 on {HOST} failed first: frozen: ") for one in ended)


def test_workers_beside_an_echo_go_on_until_the_cause_is_found(node, tmp_path):
    """On their host nothing else has failed: that they would be ended in vain if the other host found no cause."""
    script = f"""
        def told(*_):
            stat = pathlib.Path("/proc", (HERE / "pid-2").read_text(), "stat")
            note("told", stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "")
            sys.exit(0)
        if RANK == 0:
            wait_for("stopped"), wait_for("up")
            {ECHO}
        if RANK == 1:
            signal.signal(signal.SIGTERM, told)
            note("up")
            hang()
        beat(step=1)
        note("stopped")
        die("SIGSTOP")
    """
    options = ("--grace", "1.5", "--heartbeat-timeout", "5")
    runs = [node(0, script, *options, workers=2), node(1, script, *options)]
    assert [run.end().code for run in runs] == [137, 137]
    assert (tmp_path / "told").read_text() != "T", "before the stopped one was killed"


def test_worker_that_is_through_leaves_the_others_alone(both):
    ended = both("wait_gone(0) if RANK else None; print('ended')")
    assert [one.code for one in ended] == [0, 0]


def test_restart_of_all_hosts(both, tmp_path):
    script = """
        print(ATTEMPT, os.environ["TFDIST_RUN_ID"], json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
        if ATTEMPT == 0:
            note(f"up-{RANK}")
            wait_for("up-0"), wait_for("up-1")
            die() if RANK == 1 else hang()
    """
    ended = both(script, "--max-restarts", "2", "--log-dir", "logs", *NO_DELAY)
    assert [one.code for one in ended] == [0, 0]
    for rank, one in enumerate(ended):
        assert says(one, f"worker 1 on {HOST} failed first: killed by SIGKILL")
        assert says(one, "restart 1 of 2 at once with 2 workers")
        (_, run, first), (_, run_again, second) = (line.split(" ", 2) for line in one.of(rank))
        assert run == run_again and first != second, "fresh ports"
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert [line[:14] for line in log.splitlines() if line.startswith("=")] == ["==== attempt 1"]
        assert len(log.splitlines()) == 3


def test_killed_supervisor_comes_back(node, tmp_path):
    script = """
        print("in attempt", ATTEMPT)
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
    lost = f"node 1 ({HOST}) was lost: the connection was closed"
    assert says(ended[0], f"ending the workers: {lost}")
    assert says(ended[0], f"the attempt failed: {lost}")
    assert {"pid-0-of-attempt-1", "pid-1-of-attempt-1"} <= set(first.pids())
    assert [line for line in log.read_text().splitlines() if line.startswith("in")] == ["in attempt 0", "in attempt 1"]


def test_lost_host_that_stays_away(node):
    script = "beat(step=1); note(f'up-{RANK}'); hang()"
    first, second = (node(rank, script, "--max-restarts", "1", "--start-timeout", "2", *NO_DELAY) for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    second.process.kill()
    second.process.communicate()
    ended = first.end()
    assert ended.code == 1
    assert ended.said[-2:] == ["waiting for node 1", "not started: node 1 did not join in 2 s"]


def test_lost_host_without_restarts_ends_the_run(node):
    first, second = (node(rank, "note(f'up-{RANK}'); hang()") for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    second.process.kill()
    second.process.communicate()
    ended = first.end()
    assert ended.code == 1
    assert says(ended, f"the attempt failed: node 1 ({HOST}) was lost")


def test_lost_rendezvous(node):
    """Node 0's end is the run's; the others say so with a code of their own."""
    first, second = (node(rank, "note(f'up-{RANK}'); hang()", "--max-restarts", "3") for rank in (0, 1))
    second.wait_for("up-0", "up-1")
    first.process.kill()
    ended = second.end()
    assert ended.code == 69
    # The coordinator may have a moment left in which it says why.
    lost = "the rendezvous was lost (the connection was closed): this host ends its workers (exit code 69)"
    assert says(ended, lost) or says(ended, "the run ends, as the rendezvous is there")


def test_stopped_supervisor_is_lost(node):
    script = "note(f'up-{RANK}'); hang()"
    first, second = (node(rank, script, "--heartbeat-timeout", "2") for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    second.process.send_signal(signal.SIGSTOP)
    ended = first.end()
    assert ended.code == 1
    assert says(ended, f"the attempt failed: node 1 ({HOST}) was lost: no sign of life for 2 s")
    second.process.send_signal(signal.SIGCONT)
    assert second.end().code == 69


def test_stopped_supervisor_of_node_0_ends_the_run(node):
    first, second = (node(rank, "note(f'up-{RANK}'); hang()", "--heartbeat-timeout", "2") for rank in (0, 1))
    first.wait_for("up-0", "up-1")
    first.process.send_signal(signal.SIGSTOP)
    ended = second.end()
    assert ended.code == 69
    assert says(ended, f"node 0 ({HOST}) was lost: no sign of life for 2 s; the run ends, as the rendezvous is there")
    first.process.send_signal(signal.SIGCONT)
    assert first.end().code == 69


def test_fewer_hosts_go_on_and_a_host_is_taken_in_again(node):
    script = """
        print(ATTEMPT, len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]), os.environ["TFDIST_FULL_WORKERS"])
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
    while not said or b"attempt 1 runs already" not in said[-1]:
        said.append(again.process.stderr.readline())
        assert said[-1], said
    (first._here / "go").touch()
    ended = [first.end(), again.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert ended[0].of(0) == ["0 2 2", "1 1 2", "2 2 2"]
    assert ended[1].of(1) == ["2 2 2"]
    assert says(ended[0], "restart 1 of 3 at once with 1 worker, 1 fewer than asked for")


SAVES = """
    def save(*_):
        note(f"told-{RANK}")
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    note(f"up-{RANK}")
    hang()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("told", [0, 1])
def test_preemption_of_one_host_is_that_of_all(node, name, told):
    runs = [node(rank, SAVES, "--max-restarts", "3") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[told].process.send_signal(signal.Signals[name])
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [75, 75], ended
    assert all(one.said[-1] == "preempted: all workers saved and left (exit code 75)" for one in ended)
    assert says(ended[1 - told], f"ending the workers: {name} on node {told} ({HOST})")


def test_all_hosts_get_time_to_save(node):
    """Before a restart after a failure they would get half a second."""
    script = SAVES.replace("os._exit", "time.sleep(1.5); os._exit")
    runs = [node(rank, script, "--max-restarts", "3") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[0].process.send_signal(signal.SIGTERM)
    assert [run.end().code for run in runs] == [75, 75]


def test_ctrl_c_on_one_host_ends_all(node):
    runs = [node(rank, "note(f'up-{RANK}'); hang()", "--max-restarts", "3") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[1].process.send_signal(signal.SIGINT)
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [130, 130]
    assert says(ended[0], f"ending the workers: SIGINT on node 1 ({HOST})")


def test_second_ctrl_c_kills_on_all_hosts(node):
    script = "signal.signal(signal.SIGTERM, lambda *_: note(f'told-{RANK}')); note(f'up-{RANK}'); hang()"
    runs = [node(rank, script, "--grace", "600") for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    runs[1].process.send_signal(signal.SIGINT)
    runs[0].wait_for("told-0", "told-1")
    runs[1].process.send_signal(signal.SIGINT)
    assert [run.end().code for run in runs] == [130, 130]


def test_a_signal_to_each_host_is_no_second_one(node):
    """A scheduler tells all of them at once."""
    script = """
        def save(*_):
            signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
            note(f"told-{RANK}")
            wait_for("told-0"), wait_for("told-1")
            wait_for("go")
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        note(f"up-{RANK}")
        hang()
    """
    runs = [node(rank, script) for rank in (0, 1)]
    runs[0].wait_for("up-0", "up-1")
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
    runs[0].wait_for("told-0", "told-1")
    (runs[0]._here / "go").touch()
    assert [run.end().code for run in runs] == [75, 75]


def test_signal_while_waiting_for_a_host(node):
    run = node(0, "pass")
    said = []
    while not said or b"waiting for node 1" not in said[-1]:
        said.append(run.process.stderr.readline())
        assert said[-1], said
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 143


def test_signal_after_a_failure_leads_to_no_restart(node):
    script = """
        signal.signal(signal.SIGTERM, lambda *_: (note("told"), wait_for("go"), sys.exit(5)))
        note(f"up-{RANK}")
        wait_for("up-0")
        die() if RANK else hang()
    """
    runs = [node(rank, script, "--max-restarts", "3", "--grace", "60", *NO_DELAY) for rank in (0, 1)]
    runs[0].wait_for("told")
    runs[1].process.send_signal(signal.SIGTERM)
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [137, 137]
    assert not any(says(one, "restart 1") for one in ended)
