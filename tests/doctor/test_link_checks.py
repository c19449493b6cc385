"""Findings about clocks, slow links and peers that do not answer."""

import types

import pytest

from tfdist.doctor import link_measurement
from tfdist.doctor.chief_task import planned_pairs
from tfdist.doctor.link_checks import clock_findings, link_findings, reachability_findings
from tfdist.doctor.link_measurement import LinkMeasurement
from tfdist.doctor.peer_connections import OTHER_CLUSTER, OTHER_PROTOCOL, OTHER_TOKEN, REFUSED, RESOLVING

HOSTS = {"worker 0": "a", "worker 1": "a", "worker 2": "b", "worker 3": "c"}


def link(first, second, there=None, back=None, offset=0.0, uncertainty=0.0):
    return LinkMeasurement(f"worker {first}", f"worker {second}", 0.001, offset, uncertainty, there, back)


def test_a_link_slower_than_the_others():
    links = [link(0, 2, 1e8, 1.1e8), link(2, 3, 1e8, 1e7), link(0, 1, 5e9, 5e9)]
    [finding] = link_findings(links, HOSTS)
    assert finding.level == "warning"
    assert finding.found == "worker 3 to worker 2 80.0 Mbit/s; worker 2 to worker 0 880.0 Mbit/s"
    assert "ethtool" in finding.remedy


def test_links_of_about_the_same_bandwidth():
    """Those within a host, which are faster, do not count; nor do those whose time alone was measured."""
    links = [link(0, 2, 1e8, 4e7), link(0, 1, 5e9, 5e9), link(0, 3)]
    [finding] = link_findings(links, HOSTS)
    assert (finding.level, finding.found) == ("ok", "320.0 Mbit/s to 800.0 Mbit/s between hosts")
    assert link_findings([link(0, 1, 5e9, 5e9)], HOSTS) == []


@pytest.mark.parametrize(
    ("offset", "uncertainty", "level"),
    [(0.9, 0.0, "ok"), (1.1, 0.0, "warning"), (-1.1, 0.0, "warning"), (1.1, 0.2, "ok"), (-1.3, 0.2, "warning")],
)
def test_clocks_count_beyond_what_is_uncertain(offset, uncertainty, level):
    [finding] = clock_findings("worker 0", [link(0, 2), link(0, 3, offset=offset, uncertainty=uncertainty)])
    assert finding.level == level
    assert ("worker 3" in finding.found) == (level == "warning") and "worker 2" not in finding.found


def test_clocks_of_others_are_not_compared():
    assert clock_findings("worker 0", [link(2, 3, offset=9.0)]) == []


def test_a_pause_while_the_own_clock_is_read_makes_the_offset_uncertain(monkeypatch):
    now = [100.0]

    def clock():
        read = now[0]
        now[0] += 0.5
        return read

    peer = types.SimpleNamespace(request=lambda **_: {"clock": now[0]})  # whose clock is the same
    monkeypatch.setattr(link_measurement, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    found = link_measurement.measure("worker 0", "worker 1", peer, clock, with_bandwidth=False)
    assert abs(found.clock_offset_seconds) <= found.clock_uncertainty_seconds


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_every_task_is_measured(count):
    tasks = [f"worker {rank}" for rank in range(count)]
    pairs = planned_pairs(tasks)
    assert len({frozenset(pair[:2]) for pair in pairs}) == len(pairs)
    assert {second for first, second, _ in pairs if first == tasks[0]} == set(tasks[1:])  # every clock
    with_bandwidth = [pair for pair in pairs if pair[2]]
    assert {task for first, second, _ in with_bandwidth for task in (first, second)} == set(tasks)
    assert len(with_bandwidth) == (count * (count - 1) // 2 if count <= 4 else count)
    assert planned_pairs(tasks[:1]) == []


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (REFUSED, "at the same time"),
        ("no answer in 5 s: the host is down", "firewall"),
        ("the name x does not resolve", "/etc/hosts"),
        (RESOLVING, "name server"),
        (OTHER_TOKEN, "Set the same TFDIST_TOKEN"),
        (OTHER_CLUSTER, "same cluster"),
        (OTHER_PROTOCOL, "same version of tfdist"),
        ("something new", "ss -ltnp"),
    ],
)
def test_each_reason_has_its_remedy(reason, remedy):
    [finding] = reachability_findings({"worker 0": {"worker 1": reason}}, {"worker 0": "a:1", "worker 1": "b:1"})
    assert remedy in finding.remedy


def test_same_failure_is_reported_once():
    missing = {"worker 0": {"worker 2": "x"}, "worker 1": {"worker 2": "x"}, "worker 3": {"worker 2": "y"}}
    first, second = reachability_findings(missing, {f"worker {rank}": "a:1" for rank in range(4)})
    assert "did not answer worker 0, worker 1: x" in first.found and "did not answer worker 3: y" in second.found
