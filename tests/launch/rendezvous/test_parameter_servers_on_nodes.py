"""A chief on node 0, workers on all nodes, which come and go, and parameter servers on nodes that must stay."""

import json
import pathlib

import pytest
from coordinator_hosts import Hosts
from node_runs import HOST, NO_DELAY, says, says_lost
from role_runs import of, serve_by

ROOT = pathlib.Path(__file__).resolve().parents[3]


def ranks_of(hosts):
    return {rank: hosts.connections[rank].take("start")[0]["ranks"] for rank in hosts.connections}


def test_parameter_servers_are_spread_over_the_nodes():
    hosts = Hosts(nodes=3, servers=4).start(w1=2)
    # By rank: the chief, workers 0 to 3, ps 0 to 3.
    assert ranks_of(hosts) == {0: [0, 1, 5, 8], 1: [2, 3, 6], 2: [4, 7]}


def test_addresses_are_those_of_the_ranks():
    hosts = Hosts(servers=2).start()
    [start] = hosts.connections[1].take("start")
    assert start["addresses"] == [f"127.0.0.1:{port}" for port in (1000, 1001, 2000, 1002, 2001)]
    counts = {key: start[key] for key in ("workers", "all_workers", "parameter_servers", "has_chief")}
    assert counts == {"workers": 2, "all_workers": 2, "parameter_servers": 2, "has_chief": False}


def test_hosts_agree_on_the_number_of_parameter_servers():
    hosts = Hosts(servers=1)
    hosts.join(0)
    options = {
        "--nodes": 2,
        "--max-restarts": 3,
        "--min-workers": None,
        "--elastic": None,
        "--chief": False,
        "--parameter-servers": 2,
        "--seed": None,
    }
    [answer] = hosts.join(1, options=options).take("rejected")
    assert answer["reason"].startswith("Received: --parameter-servers 2. Expected: --parameter-servers 1, as on node 0")


def test_training_continues_without_a_node_that_has_only_workers():
    hosts = Hosts(servers=1).start()
    hosts.connections[0].take("notice")
    hosts.lose(1)
    hosts.look(30.0)
    assert not hosts.orders(0)
    (notice,) = hosts.connections[0].take("notice")
    assert notice["text"] == "node 1 (h1) was lost: gone; training continues without worker 1"
    hosts.done(0, 0, -15, -15)
    assert hosts.over() == 0


def test_lost_node_takes_its_processes_back():
    hosts = Hosts(nodes=3, servers=1).start()
    before = ranks_of(hosts)
    hosts.lose(1)
    [again] = hosts.join(1).take("start")
    assert (again["attempt"], again["ranks"], again["addresses"][2]) == (0, before[1], "127.0.0.1:2000")
    hosts.done(0, 0, 0, 0)
    assert hosts.orders(1) == hosts.orders(2) == [("the chief has ended", None, False)]
    hosts.done(2, -15, signalled=True)
    assert not hosts.connections[0].take("run_over"), "it waits for the node that has returned"
    hosts.done(1, -15, signalled=True)
    assert hosts.over() == 0


@pytest.mark.parametrize("changed", [{"address": "127.0.0.9"}, {"workers": 1}])
def test_node_that_differs_takes_part_from_the_next_restart(changed):
    """The addresses of a cluster of TensorFlow do not change, and no other process can take a worker's."""
    hosts = Hosts(servers=1).start(w1=2)
    hosts.lose(1)
    connection = hosts.join(1, **{"workers": 2, **changed})
    assert not connection.take("start")
    assert connection.take("notice")[-1]["text"].endswith("takes part from the next restart")
    hosts.tell(0, "failed", attempt=0, text="ps 0: exit code 3")
    hosts.done(0, -15, -15, 3, signalled=False)
    hosts.get_ready()
    assert hosts.connections[1].take("start")[0]["attempt"] == 1


def test_lost_node_with_a_parameter_server_ends_the_attempt():
    hosts = Hosts(servers=2).start()
    hosts.lose(1)
    assert hosts.orders(0) == [("node 1 (h1) was lost: gone", None, False)]
    hosts.done(0, -15, -15, -15, signalled=True)
    assert hosts.connections[0].take("attempt_over")
    assert not hosts.join(1).take("start"), "another attempt"
    hosts.get_ready()
    assert [start["attempt"] for start in hosts.connections[0].take("start")] == [0, 1]


def test_parameter_servers_move_to_the_nodes_that_are_left():
    hosts = Hosts(servers=2, min_workers=1).start()
    hosts.lose(1)
    hosts.done(0, -15, -15, -15, signalled=True)
    hosts.connections[0].take("start")
    hosts.get_ready()
    [start] = hosts.connections[0].take("start")
    assert (start["attempt"], start["ranks"], start["workers"], start["all_workers"]) == (1, [0, 1, 2, 3], 1, 2)


def test_parameter_server_that_fails_again_takes_no_worker_away():
    hosts = Hosts(servers=1, min_workers=1).start()
    for attempt in (0, 1, 2):
        hosts.tell(0, "failed", attempt=attempt, text="ps 0: exit code 3")
        hosts.done(0, -15, -15, 3, attempt=attempt, step=attempt)
        hosts.done(1, -15, attempt=attempt, signalled=True)
        hosts.get_ready()
        assert hosts.connections[1].take("start")[-1]["workers"] == 2


def test_attempt_fails_when_no_node_has_a_worker():
    hosts = Hosts(servers=1, max_restarts=0).start()
    hosts.tell(1, "no_worker", attempt=0)
    hosts.look(30.0)
    assert not hosts.connections[1].take("no_worker_left") and not hosts.orders(1)
    hosts.tell(0, "no_worker", attempt=0)
    [answer] = hosts.connections[0].take("no_worker_left")
    assert answer["attempt"] == 0
    hosts.tell(0, "failed", attempt=0, text="worker 0: exit code 5; no worker is left")
    assert [order[0] for order in hosts.orders(1)] == ["worker 0: exit code 5; no worker is left"]


def test_loss_of_the_last_node_with_workers_ends_the_attempt():
    hosts = Hosts(servers=1).start()
    hosts.tell(0, "no_worker", attempt=0)
    hosts.lose(1)
    assert hosts.orders(0) == [("node 1 (h1) was lost: gone", None, False)]


def test_exits_of_workers_are_no_failure_when_the_chief_has_ended():
    hosts = Hosts(servers=1).start()
    hosts.done(0, 0, -15, -15)
    hosts.done(1, 1, lines=["UnavailableError: Socket closed"])
    assert hosts.over() == 0


@pytest.fixture
def nodes(node, tmp_path):
    """`nodes(script, *options, server=script)`: two nodes with a worker each, and a parameter server."""

    def begin(script, *options, server="", servers=1):
        env = serve_by(server, tmp_path, ROOT)
        options = ("--parameter-servers", str(servers), *options)
        begin.again = lambda rank: node(rank, f"from task import *\n{script}", *options, env=env)
        return [begin.again(rank) for rank in (0, 1)]

    return begin


def test_worker_of_another_node_is_restarted_alone(nodes):
    """The only process of its node: the node stays in the attempt while it has none."""
    script = "up('ps-0', 'worker-0'); kill('worker-1'); up('worker-1', life=1); print(os.environ['TF_CONFIG'])"
    ended = [run.end() for run in nodes(script, server=" " * 8 + "print(LIFE)")]
    assert [one.code for one in ended] == [0, 0], ended
    assert says(ended[1], "worker 1 failed: killed by SIGKILL (possibly the OOM killer); training waits") is False
    assert says(ended[1], "worker 1 failed: killed by SIGKILL (possibly the OOM killer); training continues without it")
    assert (of(ended[1], "worker 1"), of(ended[0], "worker 0")) == (["0", "1"], ["0"])
    [config] = [json.loads(line) for line in of(ended[0], "chief")]
    assert {job: len(addresses) for job, addresses in config["cluster"].items()} == {"chief": 1, "worker": 2, "ps": 1}
    assert not any("failed first" in line for one in ended for line in one.said)


def test_killed_supervisor_joins_the_running_attempt(nodes, tmp_path):
    script = "up('worker-1'); note('up'); up('worker-1', life=1); print(ATTEMPT)"
    first, second = nodes(script, server=" " * 8 + "print(os.environ['TF_CONFIG'])")
    first.wait_for("up")
    shown = next(line.decode() for line in second.process.stdout if line.startswith(b"[worker 1] "))
    second.process.kill()
    second.process.communicate()
    again = nodes.again(1)
    ended = [first.end(), again.end()]
    assert [one.code for one in ended] == [0, 0], ended
    assert of(ended[0], "chief") == ["0"]
    assert says_lost(ended[0], f"node 1 ({HOST}) was lost: {{}}; training continues without worker 1")
    assert says(ended[0], f"node 1 ({HOST}) takes part in attempt 0 again")
    assert shown.removeprefix("[worker 1] ").strip() == of(ended[1], "worker 1")[0], "the same TF_CONFIG"


def test_lost_parameter_server_of_another_node_restarts_all(nodes):
    server = """
        if (JOB, INDEX, ATTEMPT) == ("ps", 1, 0):
            up("worker-0", "worker-1")
            die()
    """
    script = "beat(step=1)\nif ATTEMPT == 0: hang()\nup('ps-1-of-attempt-1')"
    ended = [run.end() for run in nodes(script, "--max-restarts", "1", *NO_DELAY, server=server, servers=2)]
    assert [one.code for one in ended] == [0, 0], ended
    cause = f"ps 1 on {HOST} failed first: killed by SIGKILL (possibly the OOM killer). It printed nothing."
    assert all(says(one, cause) and says(one, "restart 1 of 1 at once with 2 workers") for one in ended)


def test_no_worker_is_left_on_any_node(nodes, state, tmp_path):
    server = """
        if JOB == "worker" and INDEX == 0:
            wait_for("go")
        if JOB == "worker":
            os._exit(5)
    """
    runs = nodes("hang()", "--worker-restarts", "0", server=server)
    said = [b""]
    while b"worker 1 failed: exit code 5; not restarted (--worker-restarts 0)" not in said[-1]:
        said.append(runs[1].process.stderr.readline())
        assert said[-1], said
    runs[1].until(lambda: state(runs[1].process.pid) == "S", "the report of node 1, before that of node 0")
    (tmp_path / "go").touch()
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [5, 5], ended
    cause = (
        f"worker 0 on {HOST} failed first: exit code 5; no worker is left (--worker-restarts 0). It printed nothing."
    )
    assert all(says(one, cause) for one in ended)
