"""Reports about tasks that fail during the checks."""

import socket
import threading
import time

from tfdist.doctor import chief_task as chief
from tfdist.doctor import member_task as member
from tfdist.doctor.member_task import ReportSummary
from tfdist.doctor.report import Finding
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.transport_errors import ConnectionClosedError

LIMIT_SECONDS = 30


def test_a_peer_whose_checks_do_not_end(tasks, found, monkeypatch):
    """The report does not wait for it."""
    monkeypatch.setattr(chief, "_CHECKS_SECONDS", 3.0)
    release = threading.Event()
    cluster = tasks(jobs=[("worker", 3)])
    cluster.start("worker 0").start("worker 2")
    cluster.start("worker 1", checks=[lambda context: release.wait(LIMIT_SECONDS) and []], timeout=1000)
    end = time.monotonic() + LIMIT_SECONDS
    while "worker 0" not in cluster._results and time.monotonic() < end:
        time.sleep(0.01)
    release.set()
    results = cluster.results()
    [lost] = found(results["worker 0"], "peers", level="error")
    assert lost.found == "worker 1 left before the report: its own checks did not end"
    assert [(link.first, link.second) for link in results["worker 0"].links] == [("worker 0", "worker 2")]
    assert results["worker 2"] == ReportSummary("worker 0", errors=1, warnings=0)
    assert results["worker 1"].errors  # left alone, it reports for itself


def test_a_peer_that_leaves_in_the_middle(tasks, found, monkeypatch):
    """After it has reported, before it is measured."""
    left = []
    plan = chief.planned_pairs

    def leave_first(names):
        left[0].close()
        return plan(names)

    monkeypatch.setattr(chief, "planned_pairs", leave_first)
    cluster = tasks()
    context = cluster.context("worker 1")
    server = socket.create_server(("127.0.0.1", cluster.port("worker 1")))
    left.append(member.MemberTask(context, context.config, server, clock=time.time))
    left[0].findings = []
    left[0].peers.dial(20)
    report = cluster.start("worker 0").results()["worker 0"]
    assert [x.level for x in found(report, "links")] == ["error"]
    [lost] = found(report, "peers", level="error")
    assert "worker 1 left before the report" in lost.found and not report.links


def test_large_transfers_that_do_not_pass(tasks, found, monkeypatch):
    """As with an MTU that is smaller on the path than at its ends: small messages pass, large ones do not."""
    monkeypatch.setattr(BlockingConnection, "send_bytes", _never)
    report = tasks().start("worker 0").start("worker 1").results()["worker 0"]
    [link] = found(report, "links")
    assert link.level == "error" and "worker 0 and worker 1 could not be measured: it does not read" in link.found
    assert "MTU" in link.remedy


def _never(connection, count, timeout_seconds):
    raise ConnectionClosedError("it does not read what it is sent")


def test_the_first_task_dies_in_the_middle(tasks, found):
    """The other task reports that, and its findings."""
    cluster = tasks()
    context = cluster.context("worker 0")
    server = socket.create_server(("127.0.0.1", cluster.port("worker 0")))
    first = member.MemberTask(context, context.config, server, clock=time.time)
    cluster.start("worker 1", checks=[lambda context: [Finding("ok", "x", "y")]])
    first.peers.dial(20)
    assert first.peers.wait(20) and not first.peers.missing
    end = time.monotonic() + 20
    while "worker 1" not in first.callers and time.monotonic() < end:
        time.sleep(0.01)
    first.close()
    report = cluster.results()["worker 1"]
    assert "worker 0 left before it had a report" in [x.found for x in found(report, "peers")]
    assert found(report, "x")
