"""How an attempt over several nodes ends, and what follows, without sockets and clocks."""

from coordinator_hosts import Hosts, failed_on

TRACEBACK = "Traceback (most recent call last):"


def test_first_reported_failure_is_the_root_cause():
    hosts = Hosts(max_restarts=0).start()
    hosts.tell(1, "failed", attempt=0, text="worker 1: exit code 3")
    hosts.tell(0, "failed", attempt=0, text="worker 0: exit code 4")
    assert hosts.orders(0) == hosts.orders(1) == [("worker 1: exit code 3", None, False)]
    hosts.done(0, 4)
    assert not hosts.connections[0].take("run_over")
    hosts.done(1, 3)
    assert hosts.over(0) == 3


def test_lost_peer_waits_for_nodes_that_may_be_lost():
    hosts = Hosts().start()
    hosts.tell(0, "lost_peer", attempt=0, text="worker 0: exit code 1")
    assert hosts.orders(1) == [("worker 0: exit code 1", None, False)]
    hosts = Hosts(nodes=3).start()
    hosts.look(3.0, silent=[2])
    hosts.coordinator.handle(hosts.nodes[0], {"type": "lost_peer", "attempt": 0, "text": "echo"}, now=hosts.now)
    hosts.look(4.5, silent=[2])
    assert not hosts.orders(1)
    hosts.look(1.0, silent=[2])
    assert hosts.orders(1) == [("node 2 (h2) was lost: no heartbeat for 8 s", None, False)]


def test_lost_peer_waits_for_workers_that_may_be_frozen():
    hosts = Hosts().start()
    hosts.tell(1, "heartbeat", suspects=True)
    hosts.tell(0, "lost_peer", attempt=0, text="echo")
    hosts.look(7.0)
    assert not hosts.orders(1)
    hosts.tell(1, "heartbeat", suspects=False)
    assert hosts.orders(1) == [("echo", None, False)]


def test_grace_period_after_a_node_that_only_lost_a_peer():
    hosts = Hosts().start()
    hosts.done(0, 1, lines=[TRACEBACK, "UnavailableError: Socket closed"])
    hosts.look(4.5)
    assert not hosts.orders(1)
    hosts.look(0.5)
    assert hosts.orders(1) == [("worker 0 on h0: exit code 1", None, False)]


def test_grace_period_after_workers_that_saved_and_exited():
    hosts = Hosts().start()
    hosts.done(0, 75)
    hosts.look(24.5)
    assert not hosts.orders(1)
    hosts.look(0.5)
    assert hosts.orders(1) == [("workers of other hosts saved and exited", None, False)]


def test_workers_that_finished_do_not_end_the_others():
    hosts = Hosts().start()
    hosts.done(0, 0)
    hosts.look(10_000.0)
    assert not hosts.orders(1)
    hosts.done(1, 0)
    assert hosts.over() == hosts.over(1) == 0


def test_failure_in_an_outcome_that_was_not_reported_before():
    hosts = Hosts(max_restarts=0).start()
    hosts.done(0, 3)
    assert hosts.orders(1) == [("worker 0 on h0: exit code 3", None, False)]


def test_silent_node_is_lost_at_the_heartbeat_timeout():
    hosts = Hosts(max_restarts=0).start()
    hosts.look(7.5, silent=[1])
    assert not hosts.orders(0)
    hosts.look(0.5, silent=[1])
    lost = "node 1 (h1) was lost: no heartbeat for 8 s"
    assert hosts.orders(0) == [(lost, None, False)]
    hosts.done(0, -15, signalled=True)
    (over,) = hosts.connections[0].take("run_over")
    assert (over["code"], over["lines"][-1]) == (1, f"the attempt failed: {lost}")
    assert over["entry"]["cause"]["description"] == lost


def test_no_loss_without_a_heartbeat_timeout():
    hosts = Hosts(silence=0.0).start()
    hosts.look(10_000.0, silent=[1])
    assert not hosts.orders(0)


def test_failure_before_a_loss_is_the_root_cause():
    hosts = Hosts(max_restarts=0).start()
    hosts.tell(0, "failed", attempt=0, text="worker 0: exit code 3")
    hosts.coordinator.lose(hosts.nodes[1], "the connection was closed", now=hosts.now)
    hosts.done(0, 3)
    assert hosts.over() == 3


def test_loss_of_node_0_ends_the_run():
    hosts = Hosts().start()
    hosts.coordinator.lose(hosts.nodes[0], "the connection was closed", now=0.0)
    assert hosts.over(1) == 69
    assert hosts.coordinator.is_over


def test_node_whose_connection_fails_is_lost():
    hosts = Hosts().start()
    hosts.connections[1].is_broken = True
    hosts.look(2.0)
    assert hosts.orders(0) == [("node 1 (h1) was lost: the other side does not read its messages", None, False)]


def test_node_of_a_worker_that_fails_twice_leaves_one_out():
    hosts = Hosts(min_workers=2, max_restarts=9).start(w0=2, w1=2)
    for attempt, expected in enumerate([(2, 2), (1, 2), (2, 2)]):
        failed_on(hosts, 0, attempt)
        prepared = tuple(hosts.connections[rank].sent[-1]["processes"] for rank in (0, 1))
        assert prepared == expected
        hosts.get_ready()


def test_delay_counts_from_the_failure():
    hosts = Hosts(delay=4.0).start()
    hosts.tell(1, "failed", attempt=0, text="killed")
    hosts.look(3.0)
    hosts.done(1, -9, step=None)
    hosts.done(0, -15, signalled=True, step=None)
    hosts.look(0.5)
    assert not hosts.connections[0].take("prepare")
    hosts.look(0.5)
    assert hosts.connections[0].take("prepare")


def test_progress_is_that_of_the_furthest_node_and_the_newest_fit():
    """Each attempt goes further than the one before: the chief, on node 0, first trains alone."""
    hosts = Hosts(max_restarts=9).start()
    for attempt, (fit, step) in enumerate([(1, 900), (2, 40), (2, 80), (3, 5), (3, 5), (3, 4)]):
        hosts.tell(0, "failed", attempt=attempt, text="exit code 1")
        hosts.done(0, 1, attempt=attempt, fit=fit, step=step)
        hosts.done(1, -15, attempt=attempt, signalled=True, fit=1, step=1000)
        hosts.get_ready()
    (over,) = hosts.connections[0].take("run_over")
    assert over["lines"][-1].endswith("(none got beyond step 5 of fit 3, none saved a new checkpoint)")
    assert (over["entry"]["last_fit"], over["entry"]["last_step"]) == (3, 4)


def test_stop_while_nothing_runs_ends_the_run():
    hosts = Hosts()
    hosts.join(1)
    hosts.tell(1, "stop", signal=15, again=False)
    (over,) = hosts.connections[1].take("run_over")
    assert (over["code"], over["lines"]) == (143, ["SIGTERM on node 1 (h1): the run ends"])


def test_second_signal_kills():
    hosts = Hosts().start()
    hosts.tell(1, "stop", signal=2, again=False)
    assert hosts.orders(0) == [("SIGINT on node 1 (h1)", 2, False)]
    hosts.tell(0, "stop", signal=2, again=False)
    assert hosts.orders(0) == []
    hosts.tell(1, "stop", signal=2, again=True)
    assert hosts.orders(0) == [("SIGINT on node 1 (h1)", 2, True)]


def test_preemption_without_a_signal_to_a_supervisor_leads_to_a_restart():
    hosts = Hosts(max_restarts=1).start()
    for rank in (0, 1):
        hosts.done(rank, 75)
    (settled,) = hosts.connections[0].take("attempt_over")
    assert settled["lines"][0] == "all workers saved and exited, although this command received no signal"
    hosts.get_ready()
    for rank in (0, 1):
        hosts.done(rank, 75, attempt=1)
    assert hosts.over() == 75
