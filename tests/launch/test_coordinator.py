"""The rules of a run over several hosts, without sockets and clocks."""

import pytest

from tfdist.launch.limits import Limits
from tfdist.launch.nodes.coordinator import Coordinator
from tfdist.launch.nodes.link import LinkClosed
from tfdist.launch.nodes.rules import Rules

TRACEBACK = "Traceback (most recent call last):"


class FakeLink:
    """Keeps what it is sent."""

    def __init__(self, local_address="127.0.0.1") -> None:
        self.sent, self.local_address = [], local_address
        self.is_broken = False

    def send(self, message):
        if self.is_broken:
            raise LinkClosed("it does not read what it is sent")
        self.sent.append(message)

    def close(self):
        self.sent.append({"type": "closed"})

    def take(self, kind):
        """The messages of a kind since the last call."""
        found = [message for message in self.sent if message["type"] == kind]
        self.sent = [message for message in self.sent if message["type"] != kind]
        return found


class Hosts:
    """A coordinator and what hosts tell it. Silence limit 8 s, patience 5 s, grace to save 25 s."""

    def __init__(
        self, *, nodes=2, max_restarts=3, min_workers=None, delay=0.0, start_timeout=60.0, silence=8.0
    ) -> None:
        self.rules = Rules("f00d", nodes, max_restarts, min_workers, delay, start_timeout, Limits(None, silence, 0.0))
        self.now = 0.0
        self.coordinator = Coordinator(self.rules, now=0.0)
        self.links, self.members = {}, {}

    def join(self, rank, *, workers=1, address="127.0.0.1", seen_as="127.0.0.1", **changed):
        link = FakeLink(seen_as)
        same = {"--nodes": self.rules.nodes, "--max-restarts": self.rules.max_restarts}
        options = {**same, "--min-workers": self.rules.min_workers}
        said = {"node": rank, "host": f"h{rank}", "workers": workers, "address": address, "options": options, **changed}
        member = self.coordinator.join(link, said, now=self.now)
        if member is not None:
            self.links[rank], self.members[rank] = link, member
        self.look()
        return link

    def look(self, seconds=0.0, *, silent=()):
        """Lets time pass, in which all but some give signs of life."""
        end = self.now + seconds
        while True:
            for rank, member in self.members.items():
                if rank not in silent:
                    member.heard_at = self.now
            self.coordinator.look(now=self.now)
            if self.now >= end:
                return
            self.now = min(self.now + 0.5, end)

    def tell(self, rank, kind, **said):
        self.coordinator.hear(self.members[rank], {"type": kind, **said}, now=self.now)
        self.look()

    def get_ready(self):
        self.look()
        for rank, link in self.links.items():
            for prepare in link.take("prepare"):
                ports = [1000 * (rank + 1) + index for index in range(prepare["workers"])]
                self.tell(rank, "ready", round=prepare["round"], ports=ports)

    def start(self, **workers):
        for rank in range(self.rules.nodes):
            self.join(rank, workers=workers.get(f"w{rank}", 1))
        self.get_ready()
        return self

    def done(self, rank, *codes, attempt=0, told=False, lines=(), **changed):
        first = self.members[rank].first_rank
        ends = [
            {
                "rank": first + index,
                "returncode": code,
                "last_lines": list(lines),
                "was_told": told,
                "verdict": "",
                "at": 0.0,
            }
            for index, code in enumerate(codes)
        ]
        nothing = {"stall": "", "unstarted": None, "heard": [], "step": attempt, "saved": None, "errors": []}
        outcome = {"workers": len(codes), "ends": ends, **nothing, "heard": [end["rank"] for end in ends], **changed}
        self.tell(rank, "done", attempt=attempt, outcome=outcome)

    def orders(self, rank):
        return [(order["reason"], order["signal"], order["kill"]) for order in self.links[rank].take("end")]

    def over(self, rank=0):
        (over,) = self.links[rank].take("over")
        return over["code"]


def test_attempt_starts_when_all_are_here_and_ready():
    hosts = Hosts(nodes=3)
    hosts.join(2, workers=2)
    hosts.join(0)
    hosts.look(59.0)
    assert not hosts.links[0].take("prepare")
    hosts.join(1, workers=3)
    assert [hosts.links[rank].sent[-1]["workers"] for rank in range(3)] == [1, 3, 2]
    hosts.get_ready()
    starts = [hosts.links[rank].take("start")[0] for rank in range(3)]
    assert [start["first_rank"] for start in starts] == [0, 1, 4]
    ports = [1000, 2000, 2001, 2002, 3000, 3001]
    assert all(start["workers"] == [f"127.0.0.1:{port}" for port in ports] for start in starts)
    assert all((start["attempt"], start["all_workers"], start["may_restart"]) == (0, 6, True) for start in starts)


def test_ready_for_an_earlier_round_does_not_count():
    hosts = Hosts(nodes=3)
    for rank in range(3):
        hosts.join(rank)
    (early,) = hosts.links[0].take("prepare")
    hosts.coordinator.lose(hosts.members.pop(2), "gone", now=0.0)
    hosts.join(2)
    (late,) = hosts.links[0].take("prepare")
    hosts.get_ready()
    hosts.tell(0, "ready", round=early["round"], ports=[9])
    hosts.tell(0, "ready", round=late["round"], ports=[1000])
    assert hosts.links[0].take("start")[0]["workers"][0] == "127.0.0.1:1000"


@pytest.mark.parametrize("ports", [[], [1, 2], [0], [65_536], ["a"], 7])
def test_ports_that_are_none(ports):
    hosts = Hosts()
    hosts.join(0)
    hosts.join(1)
    with pytest.raises((ValueError, TypeError)):
        hosts.tell(0, "ready", round=1, ports=ports)


def test_host_that_does_not_get_ready_is_lost():
    hosts = Hosts()
    hosts.join(0)
    hosts.join(1)
    hosts.tell(0, "ready", round=1, ports=[1000])
    hosts.look(30.0)
    assert hosts.links[1].take("closed")
    assert "node 1 (h1) was lost: it did not get ready" in [news["text"] for news in hosts.links[0].take("news")]


def test_node_0_that_knows_itself_as_loopback_is_reached_where_others_reach_the_rendezvous():
    hosts = Hosts()
    hosts.join(0, address="127.0.1.1")
    hosts.join(1, address="10.0.0.2", seen_as="10.0.0.1")
    hosts.get_ready()
    assert hosts.links[0].take("start")[0]["workers"] == ["10.0.0.1:1000", "10.0.0.2:2000"]


def test_addresses_that_are_given_stay():
    hosts = Hosts()
    hosts.join(0, address="fd00::1")
    hosts.join(1, address="node1", seen_as="10.0.0.1")
    hosts.get_ready()
    assert hosts.links[0].take("start")[0]["workers"] == ["[fd00::1]:1000", "node1:2000"]


def test_first_complaint_is_the_cause_whoever_is_done_first():
    hosts = Hosts(max_restarts=0).start()
    hosts.tell(1, "failed", attempt=0, text="worker 1: exit code 3")
    hosts.tell(0, "failed", attempt=0, text="worker 0: exit code 4")
    assert hosts.orders(0) == hosts.orders(1) == [("worker 1: exit code 3", None, False)]
    hosts.done(0, 4)
    assert not hosts.links[0].take("over")
    hosts.done(1, 3)
    assert hosts.over(0) == 3


def test_what_belongs_to_another_attempt_is_nothing():
    hosts = Hosts().start()
    hosts.tell(1, "failed", attempt=7, text="worker 1: exit code 3")
    hosts.done(1, 3, attempt=7)
    assert not hosts.orders(0)


def test_echo_waits_for_hosts_that_may_be_lost():
    hosts = Hosts().start()
    hosts.tell(0, "echo", attempt=0, text="worker 0: exit code 1")
    assert hosts.orders(1) == [("worker 0: exit code 1", None, False)]
    hosts = Hosts(nodes=3).start()
    hosts.look(3.0, silent=[2])
    hosts.coordinator.hear(hosts.members[0], {"type": "echo", "attempt": 0, "text": "echo"}, now=hosts.now)
    hosts.look(4.5, silent=[2])
    assert not hosts.orders(1)
    hosts.look(1.0, silent=[2])
    assert hosts.orders(1) == [("node 2 (h2) was lost: no sign of life for 8 s", None, False)]


def test_echo_waits_for_workers_that_may_be_frozen():
    hosts = Hosts().start()
    hosts.tell(1, "beat", suspects=True)
    hosts.tell(0, "echo", attempt=0, text="echo")
    hosts.look(7.0)
    assert not hosts.orders(1)
    hosts.tell(1, "beat", suspects=False)
    assert hosts.orders(1) == [("echo", None, False)]


def test_host_that_has_ended_with_an_echo_is_waited_for_with_patience():
    hosts = Hosts().start()
    hosts.done(0, 1, lines=[TRACEBACK, "UnavailableError: Socket closed"])
    hosts.look(4.5)
    assert not hosts.orders(1)
    hosts.look(0.5)
    assert hosts.orders(1) == [("worker 0 on h0: exit code 1", None, False)]


def test_workers_that_saved_and_left_are_followed_by_the_others_or_these_are_ended():
    hosts = Hosts().start()
    hosts.done(0, 75)
    hosts.look(24.5)
    assert not hosts.orders(1)
    hosts.look(0.5)
    assert hosts.orders(1) == [("workers of other hosts have saved and left", None, False)]


def test_workers_that_are_through_are_no_reason():
    hosts = Hosts().start()
    hosts.done(0, 0)
    hosts.look(10_000.0)
    assert not hosts.orders(1)
    hosts.done(1, 0)
    assert hosts.over() == hosts.over(1) == 0


def test_failure_that_was_not_told_of_before():
    hosts = Hosts(max_restarts=0).start()
    hosts.done(0, 3)
    assert hosts.orders(1) == [("worker 0 on h0: exit code 3", None, False)]


def test_silent_host_is_lost_and_the_time_is_the_rule():
    hosts = Hosts(max_restarts=0).start()
    hosts.look(7.5, silent=[1])
    assert not hosts.orders(0)
    hosts.look(0.5, silent=[1])
    lost = "node 1 (h1) was lost: no sign of life for 8 s"
    assert hosts.orders(0) == [(lost, None, False)]
    hosts.done(0, -15, told=True)
    (over,) = hosts.links[0].take("over")
    assert (over["code"], over["lines"][-1]) == (1, f"the attempt failed: {lost}")
    assert over["entry"]["cause"]["description"] == lost


def test_no_limit_no_loss():
    hosts = Hosts(silence=0.0).start()
    hosts.look(10_000.0, silent=[1])
    assert not hosts.orders(0)


def test_failure_before_a_loss_stays_the_cause():
    hosts = Hosts(max_restarts=0).start()
    hosts.tell(0, "failed", attempt=0, text="worker 0: exit code 3")
    hosts.coordinator.lose(hosts.members[1], "the connection was closed", now=hosts.now)
    hosts.done(0, 3)
    assert hosts.over() == 3


def test_loss_of_node_0_ends_the_run():
    hosts = Hosts().start()
    hosts.coordinator.lose(hosts.members[0], "the connection was closed", now=0.0)
    assert hosts.over(1) == 69
    assert hosts.coordinator.is_over


def test_link_that_takes_no_message_is_lost():
    hosts = Hosts().start()
    hosts.links[1].is_broken = True
    hosts.look(2.0)
    assert hosts.orders(0) == [("node 1 (h1) was lost: it does not read what it is sent", None, False)]


def test_silent_host_may_be_replaced_before_it_is_lost():
    hosts = Hosts().start()
    hosts.now += 1.0
    assert hosts.join(1).sent[-1]["type"] == "refused"
    hosts.look(3.0, silent=[1])
    before = hosts.links[1]
    link = FakeLink()
    said = {"node": 1, "host": "h1", "workers": 1, "address": "127.0.0.1"}
    options = {"--nodes": 2, "--max-restarts": 3, "--min-workers": None}
    assert hosts.coordinator.join(link, {**said, "options": options}, now=hosts.now + 2.0) is not None
    assert before.take("closed")
    hosts.look()
    assert hosts.orders(0) == [("node 1 (h1) was lost: it has come back", None, False)]


def failed_on(hosts, rank, attempt, **workers):
    """An attempt that a worker of a host has ended, on all hosts."""
    hosts.tell(rank, "failed", attempt=attempt, text="killed")
    for other in hosts.members:
        share = hosts.members[other].share
        if share:
            told = other != rank
            hosts.done(other, *([-15 if told else -9] * share), attempt=attempt, told=told)
    hosts.look()


def test_host_of_a_worker_that_fails_twice_leaves_one_out():
    hosts = Hosts(min_workers=2, max_restarts=9).start(w0=2, w1=2)
    for attempt, expected in enumerate([(2, 2), (1, 2), (2, 2)]):
        failed_on(hosts, 0, attempt)
        prepared = tuple(hosts.links[rank].sent[-1]["workers"] for rank in (0, 1))
        assert prepared == expected
        hosts.get_ready()


def test_delay_counts_from_the_failure():
    hosts = Hosts(delay=4.0).start()
    hosts.tell(1, "failed", attempt=0, text="killed")
    hosts.look(3.0)
    hosts.done(1, -9, step=None)
    hosts.done(0, -15, told=True, step=None)
    hosts.look(0.5)
    assert not hosts.links[0].take("prepare")
    hosts.look(0.5)
    assert hosts.links[0].take("prepare")


def test_stop_while_nothing_runs_ends_the_run():
    hosts = Hosts()
    hosts.join(1)
    hosts.tell(1, "stop", signal=15, again=False)
    (over,) = hosts.links[1].take("over")
    assert (over["code"], over["lines"]) == (143, ["SIGTERM on node 1 (h1): the run ends"])


def test_second_signal_kills():
    hosts = Hosts().start()
    hosts.tell(1, "stop", signal=2, again=False)
    assert hosts.orders(0) == [("SIGINT on node 1 (h1)", 2, False)]
    hosts.tell(0, "stop", signal=2, again=False)
    assert hosts.orders(0) == []
    hosts.tell(1, "stop", signal=2, again=True)
    assert hosts.orders(0) == [("SIGINT on node 1 (h1)", 2, True)]


def test_preemption_without_a_told_supervisor_leads_to_a_restart():
    hosts = Hosts(max_restarts=1).start()
    for rank in (0, 1):
        hosts.done(rank, 75)
    (settled,) = hosts.links[0].take("settled")
    assert settled["lines"][0] == "all workers saved and left, though no supervisor was told to end"
    hosts.get_ready()
    for rank in (0, 1):
        hosts.done(rank, 75, attempt=1)
    assert hosts.over() == 75


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"type": "done", "attempt": 0},
        {"type": "done", "attempt": 0, "outcome": {}},
        {"type": "done", "attempt": 0, "outcome": []},
        {"type": "beat"},
        {"type": "stop", "signal": "x", "again": False},
    ],
)
def test_nonsense(said):
    hosts = Hosts().start()
    with pytest.raises((ValueError, KeyError, TypeError)):
        hosts.coordinator.hear(hosts.members[1], said, now=0.0)


@pytest.mark.parametrize("changed", [{"node": 2}, {"node": -1}, {"workers": 0}])
def test_host_that_does_not_fit(changed):
    (refused,) = Hosts().join(1, **changed).sent
    assert refused["type"] == "refused" and "Expected: a rank from 0 to 1" in refused["reason"]


def test_run_that_is_over_takes_nobody_in():
    hosts = Hosts()
    hosts.join(1)
    hosts.tell(1, "stop", signal=15, again=False)
    assert hosts.join(0).sent[-1]["type"] == "refused"
