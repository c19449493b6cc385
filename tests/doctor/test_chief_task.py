"""What the tasks of a cluster measure and compare together."""

import threading
import time
from pathlib import Path

import pytest

from tfdist.doctor import member_task as member
from tfdist.doctor.checkpoint_checks import sees_marker
from tfdist.doctor.library_checks import own_versions
from tfdist.doctor.member_task import ReportSummary
from tfdist.doctor.peer_connections import PeerConnections
from tfdist.doctor.report import Finding


def test_the_first_task_reports_for_all(tasks, found):
    cluster = tasks().start("worker 0").start("worker 1", checks=[lambda context: [Finding("warning", "x", "y")]])
    report, summary = map(cluster.results().get, ("worker 0", "worker 1"))
    assert summary == ReportSummary("worker 0", errors=0, warnings=1)
    assert (report.errors, report.warnings, report.worst_level) == (0, 1, "warning")
    assert [x.task for x in found(report, "x")] == ["worker 1"]
    assert found(report, "peers") == [Finding("ok", "peers", "all 2 tasks answer each other")]
    assert {x.task: x.level for x in found(report, "own port")} == {"worker 0": "ok", "worker 1": "ok"}
    [link] = report.links
    assert (link.first, link.second) == ("worker 0", "worker 1")
    assert min(link.bytes_per_second, link.bytes_per_second_back) > 0  # test_link_measurement.py checks the values
    assert 0 < link.round_trip_seconds < 1
    assert report.advice.workers == 2
    assert report.hosts.keys() == {"worker 0", "worker 1"}


def test_the_port_is_free_afterwards_without_delay(tasks):
    cluster = tasks().start("worker 0").start("worker 1")
    cluster.results()
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    states = {int(row[1].rpartition(":")[2], 16): row[3] for row in rows}
    assert not {states.get(cluster.port(task)) for task in ("worker 0", "worker 1")} - {None}


def test_five_tasks_measure_the_ring_and_the_time(tasks, found):
    cluster = tasks(jobs=[("chief", 1), ("worker", 3), ("ps", 1)])
    names = ["chief 0", "worker 0", "worker 1", "worker 2", "ps 0"]
    for name in names:
        cluster.start(name)
    report = cluster.results()["chief 0"]
    measured = {(x.first, x.second): x.bytes_per_second is not None for x in report.links}
    ring = {
        (names[0], names[1]),
        (names[1], names[2]),
        (names[2], names[3]),
        (names[3], names[4]),
        (names[0], names[4]),
    }
    assert {pair for pair, with_bandwidth in measured.items() if with_bandwidth} == ring
    assert measured.keys() - ring == {("chief 0", "worker 1"), ("chief 0", "worker 2")}
    assert report.advice is None  # no all-reduce beside parameter servers
    assert not report.errors


def test_one_pair_measures_at_a_time(tasks, monkeypatch):
    """Two measurements at the same time would disturb each other."""
    measure, running, most = member.measure, [], []

    def counted(*arguments, **options):
        running.append(1)
        most.append(len(running))
        time.sleep(0.05)
        try:
            return measure(*arguments, **options)
        finally:
            running.pop()

    monkeypatch.setattr(member, "measure", counted)
    cluster = tasks(jobs=[("worker", 3)])
    for rank in range(3):
        cluster.start(f"worker {rank}")
    assert len(cluster.results()["worker 0"].links) == 3
    assert most == [1, 1, 1]


def test_a_task_that_has_not_begun_to_dial_is_waited_for(tasks, monkeypatch):
    """Its checks are done, but it has not dialed yet: that is not a task without answers."""
    dial, answer, asked = PeerConnections.dial, member.MemberTask._answer_to_chief, threading.Event()

    def noted(self, name, request):
        if name == "stop_waiting":
            asked.set()
        return answer(self, name, request)

    def late(self, timeout_seconds):
        if threading.current_thread().name == "worker 1":
            assert asked.wait(10)
            time.sleep(0.5)  # the chief asks every 0.1 s
        dial(self, timeout_seconds)

    monkeypatch.setattr(member.MemberTask, "_answer_to_chief", noted)
    monkeypatch.setattr(PeerConnections, "dial", late)
    cluster = tasks(jobs=[("worker", 3)])
    for rank in range(3):
        cluster.start(f"worker {rank}")
    report = cluster.results()["worker 0"]
    assert {(link.first, link.second) for link in report.links} == {
        ("worker 0", "worker 1"),
        ("worker 0", "worker 2"),
        ("worker 1", "worker 2"),
    }
    assert not report.errors


def test_the_same_token(tasks):
    cluster = tasks()
    for rank in range(2):
        cluster.start(f"worker {rank}", environ={"TFDIST_TOKEN": "a secret"})
    assert not cluster.results()["worker 0"].errors


def test_different_versions_are_named(tasks, found, monkeypatch):
    monkeypatch.setattr(
        member,
        "own_versions",
        lambda: {**own_versions(), "tensorflow": f"2.{threading.current_thread().name[-1]}.0", "python": "3.11"},
    )
    report = tasks(jobs=[("worker", 3)]).start("worker 0").start("worker 1").start("worker 2").results()["worker 0"]
    [versions] = found(report, "same versions")
    assert versions.level == "error"
    assert versions.found == "tensorflow 2.0.0 on worker 0; tensorflow 2.1.0 on worker 1; tensorflow 2.2.0 on worker 2"


@pytest.mark.parametrize(("ahead", "level"), [(0.0, "ok"), (3.0, "warning"), (-500.0, "warning")])
def test_clocks_that_differ(tasks, found, ahead, level):
    cluster = tasks().start("worker 0").start("worker 1", clock=lambda: time.time() + ahead)
    report = cluster.results()["worker 0"]
    [clocks] = found(report, "clocks")
    [link] = report.links
    assert abs(link.clock_offset_seconds - ahead) <= link.clock_uncertainty_seconds + 1e-4
    assert link.clock_uncertainty_seconds < 0.1
    assert clocks.level == level
    if ahead:
        assert ("3.0 s (± " if ahead > 0 else "500.0 s (± ") in clocks.found
        assert ("ahead of" if ahead > 0 else "behind") in clocks.found


def test_checkpoints_in_one_directory(tasks, found, tmp_path):
    cluster = tasks()
    for rank in range(2):
        cluster.start(f"worker {rank}", checkpoints=tmp_path / "checkpoints")
    [shared] = found(cluster.results()["worker 0"], "shared checkpoints")
    assert shared.level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_in_two_directories(tasks, found, tmp_path, monkeypatch):
    monkeypatch.setattr(member, "sees_marker", lambda *place: sees_marker(*place, timeout_seconds=0.2))
    cluster = tasks(jobs=[("worker", 3)])
    for rank, name in enumerate("aba"):
        (tmp_path / name).mkdir(exist_ok=True)
        cluster.start(f"worker {rank}", checkpoints=tmp_path / name)
    [shared] = found(cluster.results()["worker 0"], "shared checkpoints")
    assert shared.level == "error" and " of worker 1 is another directory than that of worker 0" in shared.found
    assert not list(tmp_path.glob("*/*"))
