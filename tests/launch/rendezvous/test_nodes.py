"""Runs over two hosts: two launchers on this host, connected by loopback."""

import json

from node_runs import HOST, NO_DELAY, says


def test_all_workers_of_all_hosts_form_one_cluster(node):
    script = """
        print(os.environ["TF_CONFIG"])
        say(os.environ["TFDIST_RUN_ID"], ATTEMPT, os.environ["TFDIST_FULL_WORKERS"], "TFDIST_TOKEN" in os.environ)
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
    assert lines[0][1].endswith(" 0 3 True")  # a token of the workers, not that of the rendezvous


def test_root_cause_is_reported_on_all_hosts(node, tmp_path):
    script = "hang() if RANK == 0 else (wait_for('pid-0'), print('the reason'), sys.exit(3))"
    runs = [node(rank, script, "--error-file", f"error-{rank}.json") for rank in (0, 1)]
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [3, 3]
    for one in ended:
        report = one.said[one.said.index(f"worker 1 on {HOST} failed first: exit code 3. Its last lines:") :]
        assert report == [report[0], "  | the reason"]
    assert says(ended[0], "ending the workers: worker 1: exit code 3")
    assert says(ended[0], f"worker 0 on {HOST} ended after that: killed by SIGTERM")
    entries = [json.loads((tmp_path / f"error-{rank}.json").read_text()) for rank in (0, 1)]
    for entry in entries:
        cause = entry["cause"]
        assert (cause["rank"], cause["host"], cause["exit_code"], cause["last_lines"]) == (1, HOST, 3, ["the reason"])
        assert (entry["workers"], entry["attempt"], entry["host"]) == (2, 0, HOST)
        assert [end["rank"] for end in entry["exits"]] == [1, 0]
    assert entries[0]["run"] == entries[1]["run"]


LOST_PEER = "print('Traceback (most recent call last):'); print('UnavailableError: Socket closed'); sys.exit(1)"


def test_lost_peer_on_another_host_is_not_the_root_cause(both):
    script = f"""
        if RANK == 0:
            {LOST_PEER}
        wait_gone(0)
        time.sleep(0.5)  # longer than the lost peer alone would take
        sys.exit(4)
    """
    ended = both(script, "--grace", "60")
    assert [one.code for one in ended] == [4, 4], ended
    assert all(says(one, f"worker 1 on {HOST} failed first: exit code 4") for one in ended)


def test_lost_peer_is_the_root_cause_without_another(both):
    ended = both(f"hang() if RANK else None; {LOST_PEER}", "--grace", "0.3")
    assert [one.code for one in ended] == [1, 1]
    assert all(says(one, f"worker 0 on {HOST} failed first: exit code 1") for one in ended)


def test_lost_peer_waits_for_a_frozen_worker_on_another_host(node, tmp_path):
    """A worker beside the one that lost its peer continues meanwhile: nothing else failed on its host."""
    script = f"""
        def signalled(*_):
            note("signalled", state_of(pid_file(2)))
            sys.exit(0)
        if RANK == 0:
            wait_for(pid_file(2)), wait_for("up")
            wait_until(lambda: state_of(pid_file(2)) == "T")
            {LOST_PEER}
        if RANK == 1:
            signal.signal(signal.SIGTERM, signalled)
            note("up")
            hang()
        beat(step=1)
        die("SIGSTOP")
    """
    options = ("--grace", "3", "--heartbeat-timeout", "6")  # time to find it stopped, and not to find it frozen
    runs = [node(0, script, *options, workers=2), node(1, script, *options)]
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [137, 137], ended
    assert all(says(one, f"worker 2 on {HOST} failed first: frozen: ") for one in ended)
    assert (tmp_path / "signalled").read_text() != "T", "before the stopped one was killed"


def test_worker_that_exits_first_does_not_end_the_others(both):
    ended = both("wait_gone(0) if RANK else None; print('ended')")
    assert [one.code for one in ended] == [0, 0]


def test_restart_of_all_hosts(both, tmp_path):
    script = """
        say(ATTEMPT, os.environ["TFDIST_RUN_ID"], json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
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
