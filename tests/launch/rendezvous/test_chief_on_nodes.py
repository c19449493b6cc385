"""A chief on node 0 and workers on all nodes, which stay until it has ended."""

import json
import pathlib
import signal

import pytest
from coordinator_hosts import Hosts
from node_runs import HOST, says
from role_runs import of, serve_by

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def chief(node, tmp_path):
    """`chief(script, *options, server=script)`: two nodes with a worker each."""

    def begin(script, *options, server=""):
        env = serve_by(server, tmp_path, ROOT)
        return [node(rank, f"from task import *\n{script}", "--chief", *options, env=env) for rank in (0, 1)]

    return begin


def test_node_0_has_one_process_more():
    hosts = Hosts(chief=True)
    hosts.join(0, workers=2)
    hosts.join(1, workers=1)
    assert [hosts.connections[rank].sent[-1]["processes"] for rank in (0, 1)] == [3, 1]
    hosts.get_ready()
    starts = [hosts.connections[rank].take("start")[0] for rank in (0, 1)]
    assert [start["ranks"] for start in starts] == [[0, 1, 2], [3]]
    assert all((len(start["addresses"]), start["all_workers"], start["has_chief"]) == (4, 3, True) for start in starts)
    hosts.done(0, 0, 0, 0)
    assert hosts.orders(1) == [("the chief has ended", None, False)]
    hosts.done(1, -15, signalled=True)
    assert hosts.over() == 0


def test_hosts_agree_on_the_chief():
    hosts = Hosts(chief=True)
    hosts.join(0)
    options = {
        "--nodes": 2,
        "--max-restarts": 3,
        "--min-workers": None,
        "--elastic": None,
        "--chief": False,
        "--parameter-servers": 0,
        "--seed": None,
    }
    [answer] = hosts.join(1, options=options).take("rejected")
    assert answer["reason"].startswith("Received: --chief False. Expected: --chief True, as on node 0.")


def test_a_signal_is_for_the_chief_first():
    hosts = Hosts(chief=True).start()
    hosts.tell(1, "stop", signal=15, again=False)
    assert [order["only_script"] for order in hosts.connections[1].take("shut_down")] == [True]
    hosts.done(0, 75, 0)
    assert [order["only_script"] for order in hosts.connections[1].take("shut_down")] == [False]
    hosts.done(1, -15, signalled=True)
    assert hosts.over() == 75


def test_lost_worker_of_a_chief_is_not_its_end():
    """The chief's node waits for the cause of a lost peer, and does not order the others to end before."""
    hosts = Hosts(chief=True, max_restarts=0).start()
    hosts.done(0, 1, 0, lines=["UnavailableError: Socket closed"])
    assert not hosts.orders(1)
    hosts.done(1, -9)
    (over,) = hosts.connections[0].take("run_over")
    assert (over["code"], over["entry"]["cause"]["rank"]) == (137, 2)


def test_one_cluster_over_all_nodes(chief):
    runs = chief("print(os.environ['TF_CONFIG']); up('worker-0', 'worker-1')")
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [0, 0], ended
    [config] = [json.loads(line) for line in of(ended[0], "chief")]
    assert {job: len(addresses) for job, addresses in config["cluster"].items()} == {"chief": 1, "worker": 2}
    assert says(ended[1], "ending the workers: the chief has ended")
    assert says(ended[1], "attempt 0: 1 chief, 2 workers")


def test_preempted_node_lets_the_chief_save(chief, tmp_path):
    script = """
def leave(*_):
    time.sleep(0.5)
    assert not list(HERE.glob("told-*"))
    os._exit(75)
signal.signal(signal.SIGTERM, leave)
up("worker-0", "worker-1")
note("up")
hang()
"""
    runs = chief(script)
    runs[0].wait_for("up")
    runs[1].process.send_signal(signal.SIGTERM)
    ended = [run.end() for run in runs]
    assert [one.code for one in ended] == [75, 75], ended
    assert (tmp_path / "told-worker-1").exists()


def test_lost_worker_is_named_by_its_task_on_all_nodes(chief):
    server = f"{' ' * 8}if INDEX == 1: wait_for('pid-chief-0-life-0'); sys.exit(4)"
    ended = [run.end() for run in chief("beat_on(step=1)", server=server)]
    assert [one.code for one in ended] == [4, 4], ended
    assert all(says(one, f"worker 1 on {HOST} failed first: exit code 4") for one in ended)


def test_worker_that_misses_the_chief_after_its_end_does_not_fail_the_run():
    """Node 0 ends the chief's children before it reports; meanwhile workers of other hosts may see the chief lost."""
    left = {"failure_reason": "exit code 0, while it was needed"}
    for code in (0, 75):
        hosts = Hosts(chief=True).start()
        if code:
            hosts.tell(0, "stop", signal=15, again=False)
        hosts.tell(1, "failed", attempt=0, text="worker 1: exit code 0, while it was needed")
        hosts.done(1, 0, failures=left)
        hosts.done(0, code, 0)
        assert hosts.over() == code


def test_worker_that_fails_before_the_chief_is_ended_fails_the_run():
    hosts = Hosts(chief=True, max_restarts=0).start()
    hosts.tell(1, "failed", attempt=0, text="worker 1: exit code 4")
    hosts.done(1, 4)
    hosts.done(0, 0, -15, signalled=True)
    assert hosts.over() == 4
