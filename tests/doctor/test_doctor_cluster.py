"""What the tasks of a cluster find out about each other."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from tfdist.doctor import conductor, member, peers, service
from tfdist.doctor.checkpoint_directory import sees_marker
from tfdist.doctor.finding import Finding
from tfdist.doctor.libraries import own_versions
from tfdist.doctor.member import Verdict

LIMIT_SECONDS = 30


def test_the_first_task_reports_for_all(tasks, found):
    cluster = tasks().start("worker 0").start("worker 1", checks=[lambda situation: [Finding("warning", "x", "y")]])
    report, verdict = map(cluster.results().get, ("worker 0", "worker 1"))
    assert verdict == Verdict("worker 0", errors=0, warnings=1)
    assert (report.errors, report.warnings, report.verdict) == (0, 1, "warning")
    assert [x.task for x in found(report, "x")] == ["worker 1"]
    assert found(report, "peers") == [Finding("ok", "peers", "all 2 tasks answer each other")]
    assert {x.task: x.level for x in found(report, "own port")} == {"worker 0": "ok", "worker 1": "ok"}
    [link] = report.links
    assert (link.first, link.second) == ("worker 0", "worker 1")
    assert min(link.bytes_per_second, link.bytes_per_second_back) > 1e6
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
    """Wherever it happens: a measurement that is under way would be disturbed by another."""
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


def test_a_missing_peer_is_named_with_the_reason(tasks, found):
    cluster = tasks(jobs=[("worker", 3)]).start("worker 0", timeout=1).start("worker 1")
    results = cluster.results()
    [peer] = found(results["worker 0"], "peers")
    assert peer.level == "error"
    assert peer.found == (
        f"worker 2 at {cluster.address('worker 2')} did not answer worker 0, worker 1: connection refused: nothing "
        "listens on that port"
    )
    assert "--timeout" in peer.remedy
    assert results["worker 1"] == Verdict("worker 0", errors=1, warnings=0)
    assert len(results["worker 0"].links) == 1  # those that are there are measured all the same


def test_without_the_first_task_each_reports_for_itself(tasks, found):
    cluster = tasks(jobs=[("worker", 3)]).start("worker 1", timeout=1).start("worker 2", timeout=1)
    for name, report in cluster.results().items():
        [peer] = found(report, "peers")
        assert "worker 0 at" in peer.found and f"did not answer {name}" in peer.found
        assert len(report.hosts) == 2  # the other one was met


def test_a_name_that_does_not_resolve(tasks, found, monkeypatch):
    def resolve(host, *arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    cluster = tasks()
    cluster.jobs["worker"][1] = "nowhere.invalid:2222"
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    cluster.start("worker 0", timeout=0.1)
    [peer] = found(cluster.results()["worker 0"], "peers")
    assert "the name nowhere.invalid does not resolve (Name or service not known)" in peer.found
    assert "publishNotReadyAddresses" in peer.remedy


def test_no_answer_at_all(tasks, found, monkeypatch):
    """As behind a firewall that drops: the backlog of a socket that nobody accepts from is full."""
    monkeypatch.setattr(peers, "_CONNECT_SECONDS", 0.2)
    cluster = tasks()
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.create_server(("127.0.0.1", cluster.port("worker 1")), backlog=0))
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        cluster.start("worker 0", timeout=0.1)
        [peer] = found(cluster.results()["worker 0"], "peers")
    assert "no answer in 0.2 s: the host is down, or a firewall" in peer.found
    assert "firewall" in peer.remedy


@pytest.mark.parametrize(
    "says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00\x00\x12\x04" * 3000, b"[]\n", b"{}\n"]
)
def test_another_program_on_the_port_of_a_peer(tasks, found, monkeypatch, says):
    monkeypatch.setattr(peers, "_GREET_SECONDS", 0.5)
    cluster = tasks()
    with socket.create_server(("127.0.0.1", cluster.port("worker 1"))) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(100)
                        connection.sendall(says)

        threading.Thread(target=answer, daemon=True).start()
        cluster.start("worker 0", timeout=0)
        [peer] = found(cluster.results()["worker 0"], "peers")
        server.shutdown(socket.SHUT_RDWR)
    assert "another program" in peer.found or "something else than tfdist doctor" in peer.found
    assert "ss -ltnp" in peer.remedy


def test_a_hung_program_on_the_port_of_a_peer(tasks, found, monkeypatch):
    monkeypatch.setattr(peers, "_GREET_SECONDS", 0.2)
    cluster = tasks()
    with socket.create_server(("127.0.0.1", cluster.port("worker 1"))):
        cluster.start("worker 0", timeout=0)
        [peer] = found(cluster.results()["worker 0"], "peers")
    assert "it does not answer in time" in peer.found


def test_other_descriptions_of_the_cluster(tasks, found):
    cluster = tasks()
    cluster.start("worker 0", timeout=1)
    turned = {"worker": cluster.jobs["worker"], "evaluator": ["127.0.0.1:9"]}
    cluster.start("worker 1", jobs=turned, timeout=1)
    results = cluster.results()
    for name, other in (("worker 0", "worker 1"), ("worker 1", "worker 0")):
        [peer] = [x for x in found(results[name], "peers") if f"{other} at" in x.found]
        assert "its cluster's description is not the one of this task" in peer.found
        assert "the same jobs and addresses" in peer.remedy


@pytest.mark.parametrize("tokens", [("a secret", "another"), ("a secret", ""), ("", "a secret")])
def test_another_token(tasks, found, tokens):
    cluster = tasks()
    for rank, token in enumerate(tokens):
        cluster.start(f"worker {rank}", environ={"TFDIST_TOKEN": token}, timeout=1)
    for report in cluster.results().values():
        [peer] = found(report, "peers")
        assert "its TFDIST_TOKEN is not the one of this task" in peer.found
        assert "a secret" not in str(report.to_json())


def test_the_same_token(tasks):
    cluster = tasks()
    for rank in range(2):
        cluster.start(f"worker {rank}", environ={"TFDIST_TOKEN": "a secret"})
    assert not cluster.results()["worker 0"].errors


def test_two_tasks_with_one_index(tasks, found):
    """The address of worker 2 leads to a task that calls itself worker 1."""
    cluster = tasks(jobs=[("worker", 3)])
    first, second = cluster.jobs["worker"][1:]
    cluster.start("worker 0", timeout=0.5)
    # It listens on the port of worker 2, as its own address says, but its index is that of worker 1.
    confused = cluster.situation("worker 1")
    server = socket.create_server(("127.0.0.1", int(second.rpartition(":")[2])))
    one = member.Member(confused, confused.config, server, clock=time.time)
    try:
        [peer] = [x for x in found(cluster.results()["worker 0"], "peers") if second in x.found]
    finally:
        one.close()
    assert "worker 1 answers there instead: an address or an index is wrong" in peer.found


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


def test_a_taken_port_names_who_has_it(tasks, found):
    cluster = tasks()
    with socket.create_server(("127.0.0.1", cluster.port("worker 0"))):
        cluster.start("worker 0", timeout=0)
        [port] = found(cluster.results()["worker 0"], "own port")
    assert port.level == "error" and "Address already in use; process " in port.found
    assert f"process {Path('/proc/self').resolve().name} (" in port.found


def test_checkpoints_in_one_directory(tasks, found, tmp_path):
    cluster = tasks()
    for rank in range(2):
        cluster.start(f"worker {rank}", checkpoints=tmp_path / "checkpoints")
    [shared] = found(cluster.results()["worker 0"], "shared checkpoints")
    assert shared.level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_in_two_directories(tasks, found, tmp_path, monkeypatch):
    monkeypatch.setattr(member, "sees_marker", lambda *place: sees_marker(*place, limit_seconds=0.2))
    cluster = tasks(jobs=[("worker", 3)])
    for rank, name in enumerate("aba"):
        (tmp_path / name).mkdir(exist_ok=True)
        cluster.start(f"worker {rank}", checkpoints=tmp_path / name)
    [shared] = found(cluster.results()["worker 0"], "shared checkpoints")
    assert shared.level == "error" and " of worker 1 is another directory than that of worker 0" in shared.found
    assert not list(tmp_path.glob("*/*"))


def test_a_peer_whose_checks_do_not_end(tasks, found, monkeypatch):
    """The report does not wait for it."""
    monkeypatch.setattr(conductor, "_CHECKS_SECONDS", 0.3)
    release = threading.Event()
    cluster = tasks(jobs=[("worker", 3)])
    cluster.start("worker 0").start("worker 2")
    cluster.start("worker 1", checks=[lambda situation: release.wait(LIMIT_SECONDS) and []], timeout=1000)
    end = time.monotonic() + LIMIT_SECONDS
    while "worker 0" not in cluster._results and time.monotonic() < end:
        time.sleep(0.01)
    release.set()
    results = cluster.results()
    [lost] = found(results["worker 0"], "peers", level="error")
    assert lost.found == "worker 1 left the examination: its own checks did not end"
    assert [(link.first, link.second) for link in results["worker 0"].links] == [("worker 0", "worker 2")]
    assert results["worker 2"] == Verdict("worker 0", errors=1, warnings=0)
    assert results["worker 1"].errors  # left alone, it reports for itself


def test_a_peer_that_leaves_in_the_middle(tasks, found, monkeypatch):
    """After it has reported, before it is measured."""
    left = []
    plan = conductor.planned_pairs

    def leave_first(names):
        left[0].close()
        return plan(names)

    monkeypatch.setattr(conductor, "planned_pairs", leave_first)
    cluster = tasks()
    situation = cluster.situation("worker 1")
    server = socket.create_server(("127.0.0.1", cluster.port("worker 1")))
    left.append(member.Member(situation, situation.config, server, clock=time.time))
    left[0].findings_of_machine([])
    left[0].peers.dial(20)
    report = cluster.start("worker 0").results()["worker 0"]
    assert [x.level for x in found(report, "links")] == ["error"]
    [lost] = found(report, "peers", level="error")
    assert "worker 1 left the examination" in lost.found and not report.links


def test_large_transfers_that_do_not_pass(tasks, found, monkeypatch):
    """As where the MTU of a path is smaller than that of its ends: questions pass, and bytes do not."""
    monkeypatch.setattr(service.Channel, "send_bytes", _never)
    report = tasks().start("worker 0").start("worker 1").results()["worker 0"]
    [link] = found(report, "links")
    assert link.level == "error" and "worker 0 and worker 1 could not be measured: it does not read" in link.found
    assert "MTU" in link.remedy


def _never(channel, count, limit_seconds):
    raise service.ChannelError("it does not read what it is sent")


def test_the_first_task_dies_in_the_middle(tasks, found):
    """The other one says so, and what it has found itself."""
    cluster = tasks()
    situation = cluster.situation("worker 0")
    server = socket.create_server(("127.0.0.1", cluster.port("worker 0")))
    first = member.Member(situation, situation.config, server, clock=time.time)
    cluster.start("worker 1", checks=[lambda situation: [Finding("ok", "x", "y")]])
    first.peers.dial(20)
    assert first.peers.wait(20) and not first.peers.missing
    end = time.monotonic() + 20
    while "worker 1" not in first.visitors and time.monotonic() < end:
        time.sleep(0.01)
    first.close()
    report = cluster.results()["worker 1"]
    assert "worker 0 left before it had a report" in [x.found for x in found(report, "peers")]
    assert found(report, "x")


def test_a_firewall_in_one_direction(tasks, found, monkeypatch):
    """Worker 1 reaches worker 0, and not the other way: it ends soon, and the first one says what it knows."""
    dial = peers.Peers._try

    def blocked(self, peer):
        return "no answer in 5 s" if threading.current_thread().name == "dial worker 1" else dial(self, peer)

    monkeypatch.setattr(peers.Peers, "_try", blocked)
    cluster = tasks().start("worker 0", timeout=1).start("worker 1")
    results = cluster.results()
    [peer] = found(results["worker 0"], "peers")
    assert peer.found.endswith("no answer in 5 s; yet it reaches this task, so it runs")
    assert not found(results["worker 1"], "links")
