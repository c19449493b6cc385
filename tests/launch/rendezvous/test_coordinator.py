"""Which nodes take part, and when an attempt starts, without sockets and clocks."""

import pytest
from coordinator_hosts import FakeConnection, Hosts, failed_on


def test_attempt_starts_when_all_nodes_are_ready():
    hosts = Hosts(nodes=3)
    hosts.join(2, workers=2)
    hosts.join(0)
    hosts.look(59.0)
    assert not hosts.connections[0].take("prepare")
    hosts.join(1, workers=3)
    assert [hosts.connections[rank].sent[-1]["processes"] for rank in range(3)] == [1, 3, 2]
    hosts.get_ready()
    starts = [hosts.connections[rank].take("start")[0] for rank in range(3)]
    assert [start["ranks"] for start in starts] == [[0], [1, 2, 3], [4, 5]]
    ports = [1000, 2000, 2001, 2002, 3000, 3001]
    assert all(start["addresses"] == [f"127.0.0.1:{port}" for port in ports] for start in starts)
    assert all((start["attempt"], start["all_workers"], start["may_restart"]) == (0, 6, True) for start in starts)


def test_ready_for_an_earlier_round():
    hosts = Hosts(nodes=3)
    for rank in range(3):
        hosts.join(rank)
    (early,) = hosts.connections[0].take("prepare")
    hosts.coordinator.lose(hosts.nodes.pop(2), "gone", now=0.0)
    hosts.join(2)
    (late,) = hosts.connections[0].take("prepare")
    hosts.get_ready()
    hosts.tell(0, "ready", round=early["round"], ports=[9])
    hosts.tell(0, "ready", round=late["round"], ports=[1000])
    assert hosts.connections[0].take("start")[0]["addresses"][0] == "127.0.0.1:1000"


@pytest.mark.parametrize("ports", [[], [1, 2], [0], [65_536], ["a"], 7])
def test_invalid_ports(ports):
    hosts = Hosts()
    hosts.join(0)
    hosts.join(1)
    with pytest.raises((ValueError, TypeError)):
        hosts.tell(0, "ready", round=1, ports=ports)


def test_node_that_does_not_get_ready_is_lost():
    hosts = Hosts()
    hosts.join(0)
    hosts.join(1)
    hosts.tell(0, "ready", round=1, ports=[1000])
    hosts.look(30.0)
    assert hosts.connections[1].take("closed")
    assert "node 1 (h1) was lost: it did not get ready" in [
        news["text"] for news in hosts.connections[0].take("notice")
    ]


def test_node_0_with_a_loopback_address_is_reached_at_the_address_of_the_coordinator():
    hosts = Hosts()
    hosts.join(0, address="127.0.1.1")
    hosts.join(1, address="10.0.0.2", seen_as="10.0.0.1")
    hosts.get_ready()
    assert hosts.connections[0].take("start")[0]["addresses"] == ["10.0.0.1:1000", "10.0.0.2:2000"]


def test_given_addresses_are_kept():
    hosts = Hosts()
    hosts.join(0, address="fd00::1")
    hosts.join(1, address="node1", seen_as="10.0.0.1")
    hosts.get_ready()
    assert hosts.connections[0].take("start")[0]["addresses"] == ["[fd00::1]:1000", "node1:2000"]


def test_messages_of_a_node_that_is_done_are_ignored():
    hosts = Hosts().start()
    hosts.done(1, 0)
    hosts.tell(1, "failed", attempt=0, text="worker 1: exit code 3")
    hosts.tell(1, "lost_peer", attempt=0, text="worker 1: exit code 1")
    hosts.done(1, 3)
    hosts.look(60.0)
    assert not hosts.orders(0)
    hosts.done(0, 0)
    assert hosts.over() == 0


def test_signal_after_the_end_of_the_run_does_not_change_it():
    hosts = Hosts().start()
    hosts.done(0, 0)
    hosts.done(1, 0)
    hosts.tell(1, "stop", signal=15, again=False)
    assert hosts.over() == 0, "announced once"


def test_messages_of_another_attempt_are_ignored():
    hosts = Hosts().start()
    hosts.tell(1, "failed", attempt=7, text="worker 1: exit code 3")
    hosts.done(1, 3, attempt=7)
    assert not hosts.orders(0)


def test_silent_node_may_be_replaced_before_it_is_lost():
    hosts = Hosts().start()
    hosts.now += 1.0
    assert hosts.join(1).sent[-1]["type"] == "rejected"
    hosts.look(3.0, silent=[1])
    before = hosts.connections[1]
    connection = FakeConnection()
    message = {"node": 1, "host": "h1", "workers": 1, "address": "127.0.0.1"}
    options = {
        "--nodes": 2,
        "--max-restarts": 3,
        "--min-workers": None,
        "--elastic": None,
        "--chief": False,
        "--parameter-servers": 0,
        "--seed": None,
    }
    assert hosts.coordinator.join(connection, {**message, "options": options}, now=hosts.now + 2.0) is not None
    assert before.take("closed")
    hosts.look()
    assert hosts.orders(0) == [("node 1 (h1) was lost: it joined again", None, False)]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "done", "attempt": 0},
        {"type": "done", "attempt": 0, "outcome": {}},
        {"type": "done", "attempt": 0, "outcome": []},
        {"type": "heartbeat"},
        {"type": "stop", "signal": "x", "again": False},
    ],
)
def test_malformed_messages(message):
    hosts = Hosts().start()
    with pytest.raises((ValueError, KeyError, TypeError)):
        hosts.coordinator.handle(hosts.nodes[1], message, now=0.0)


@pytest.mark.parametrize("changed", [{"node": 2}, {"node": -1}, {"workers": 0}])
def test_node_that_does_not_fit(changed):
    (refused,) = Hosts().join(1, **changed).sent
    assert refused["type"] == "rejected" and "Expected: a rank from 0 to 1" in refused["reason"]


def test_run_that_is_over_rejects_nodes():
    hosts = Hosts()
    hosts.join(1)
    hosts.tell(1, "stop", signal=15, again=False)
    assert hosts.join(0).sent[-1]["type"] == "rejected"


def test_node_that_was_left_out_is_needed_when_the_other_one_is_lost():
    hosts = Hosts(nodes=2, min_workers=1, delay=5.0).start()
    failed_on(hosts, 0, 0)
    hosts.look(6.0)
    hosts.get_ready()
    failed_on(hosts, 0, 1)  # the only worker of node 0 fails again: it is left out
    hosts.coordinator.lose(hosts.nodes.pop(1), "gone", now=hosts.now)
    del hosts.connections[1]
    hosts.look(12.0)
    assert [message["processes"] for message in hosts.connections[0].take("prepare")] == [1]


def test_min_workers_when_a_node_is_lost():
    hosts = Hosts(nodes=3, min_workers=2, delay=5.0).start()
    failed_on(hosts, 2, 0)
    hosts.look(6.0)
    hosts.get_ready()
    failed_on(hosts, 2, 1)
    for connection in hosts.connections.values():
        connection.take("prepare")
    hosts.coordinator.lose(hosts.nodes.pop(1), "gone", now=hosts.now)
    del hosts.connections[1]
    hosts.look(12.0)
    assert [[message["processes"] for message in hosts.connections[rank].take("prepare")] for rank in (0, 2)] == [
        [1],
        [1],
    ]
