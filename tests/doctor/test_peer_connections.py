"""Reports about peers that do not answer, and about other programs in their place."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import pytest

from tfdist.cluster import ClusterSpec
from tfdist.doctor import member_task as member
from tfdist.doctor import peer_connections as peers
from tfdist.doctor.member_task import ReportSummary
from tfdist.doctor.peer_connections import TaskInfo, doctor_credentials
from tfdist.transport.authenticated_messages import encode_frame
from tfdist.transport.handshake import Hello

MEET_SECONDS = 3  # enough for threads of a busy process to meet


def test_a_missing_peer_is_named_with_the_reason(tasks, found):
    cluster = tasks(jobs=[("worker", 3)]).start("worker 0", timeout=MEET_SECONDS).start("worker 1")
    results = cluster.results()
    [peer] = found(results["worker 0"], "peers")
    assert peer.level == "error"
    assert peer.found == (
        f"worker 2 at {cluster.address('worker 2')} did not answer worker 0, worker 1: connection refused: no process "
        "listens on that port"
    )
    assert "--timeout" in peer.remedy
    assert results["worker 1"] == ReportSummary("worker 0", errors=1, warnings=0)
    assert len(results["worker 0"].links) == 1  # those that are there are measured all the same


def test_without_the_first_task_each_reports_for_itself(tasks, found):
    cluster = (
        tasks(jobs=[("worker", 3)]).start("worker 1", timeout=MEET_SECONDS).start("worker 2", timeout=MEET_SECONDS)
    )
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
    """As behind a firewall that drops packets: the backlog of a socket that accepts nothing is full."""
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
    "says",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00\x00\x12\x04" * 3000, encode_frame(b"[]"), encode_frame(b"{}")],
)
def test_another_program_on_the_port_of_a_peer(tasks, found, monkeypatch, says):
    monkeypatch.setattr(peers, "_HANDSHAKE_SECONDS", 20)
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
    assert "another program" in peer.found or "a program other than tfdist doctor" in peer.found
    assert "ss -ltnp" in peer.remedy


def test_a_hung_program_on_the_port_of_a_peer(tasks, found, monkeypatch):
    monkeypatch.setattr(peers, "_HANDSHAKE_SECONDS", 0.2)
    cluster = tasks()
    with socket.create_server(("127.0.0.1", cluster.port("worker 1"))):
        cluster.start("worker 0", timeout=0)
        [peer] = found(cluster.results()["worker 0"], "peers")
    assert "no answer in time" in peer.found


def test_other_descriptions_of_the_cluster(tasks, found):
    cluster = tasks()
    cluster.start("worker 0", timeout=MEET_SECONDS)
    turned = {"worker": cluster.jobs["worker"], "evaluator": ["127.0.0.1:9"]}
    cluster.start("worker 1", jobs=turned, timeout=MEET_SECONDS)
    results = cluster.results()
    for name, other in (("worker 0", "worker 1"), ("worker 1", "worker 0")):
        [peer] = [x for x in found(results[name], "peers") if f"{other} at" in x.found]
        assert peers.OTHER_CLUSTER in peer.found
        assert "the same jobs and addresses" in peer.remedy


@pytest.mark.parametrize(
    "tokens", [("a secret", "another"), ("a secret", ""), pytest.param(("", "a secret"), marks=pytest.mark.long)]
)
def test_another_token(tasks, found, tokens):
    cluster = tasks()
    for rank, token in enumerate(tokens):
        cluster.start(f"worker {rank}", environ={"TFDIST_TOKEN": token}, timeout=MEET_SECONDS)
    for report in cluster.results().values():
        [peer] = found(report, "peers")
        assert "its TFDIST_TOKEN differs from that of this task" in peer.found
        assert "a secret" not in str(report.to_json())


def test_two_tasks_with_one_index(tasks, found):
    """The address of worker 2 belongs to a task that says it is worker 1."""
    cluster = tasks(jobs=[("worker", 3)])
    first, second = cluster.jobs["worker"][1:]
    cluster.start("worker 0", timeout=MEET_SECONDS)
    # It listens on the port of worker 2, as its own address says, but its index is that of worker 1.
    confused = cluster.context("worker 1")
    server = socket.create_server(("127.0.0.1", int(second.rpartition(":")[2])))
    one = member.MemberTask(confused, confused.config, server, clock=time.time)
    try:
        [peer] = [x for x in found(cluster.results()["worker 0"], "peers") if second in x.found]
    finally:
        one.close()
    assert "worker 1 answers there instead: an address or an index is wrong" in peer.found


def test_a_taken_port_names_who_has_it(tasks, found):
    cluster = tasks()
    with socket.create_server(("127.0.0.1", cluster.port("worker 0"))):
        cluster.start("worker 0", timeout=0)
        [port] = found(cluster.results()["worker 0"], "own port")
    assert port.level == "error" and "Address already in use; process " in port.found
    assert f"process {Path('/proc/self').resolve().name} (" in port.found


def test_a_firewall_in_one_direction(tasks, found, monkeypatch):
    """Worker 1 reaches worker 0, but not the other way: it ends soon, and worker 0 reports what it knows."""
    dial = peers.PeerConnections._try

    def blocked(self, peer):
        return "no answer in 5 s" if threading.current_thread().name == "dial worker 1" else dial(self, peer)

    monkeypatch.setattr(peers.PeerConnections, "_try", blocked)
    cluster = tasks().start("worker 0", timeout=MEET_SECONDS).start("worker 1")
    results = cluster.results()
    [peer] = found(results["worker 0"], "peers")
    assert peer.found.endswith("no answer in 5 s; it connects to this task, so it runs")
    assert not found(results["worker 1"], "links")


@pytest.mark.parametrize(
    ("changed", "proof", "reason"),
    [({"nonce": "\ud800" * 64}, "", peers.NOT_DOCTOR), ({}, "\ud800", peers.OTHER_TOKEN)],
    ids=["nonce", "proof"],
)
def test_answer_that_is_not_text(changed, proof, reason):
    """JSON can encode half a character, UTF-8 cannot."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        credentials = doctor_credentials(ClusterSpec({"worker": ["127.0.0.1:1", address]}), "0123456789abcdef")
        hello = {**vars(Hello.of(credentials, is_client=False)), **changed}

        def answer():
            connection, _ = server.accept()
            with connection:
                for message in (hello, {"proof": proof}):
                    connection.recv(4096)
                    connection.sendall(encode_frame(json.dumps(message).encode()))
                connection.recv(4096)

        threading.Thread(target=answer, daemon=True).start()
        dialed = peers.PeerConnections({"worker 1": address}, TaskInfo("worker 0", "h", {}), credentials)
        dialed.stop_waiting()  # one try
        dialed.dial(5)
        assert dialed.wait(30)
        assert dialed.missing == {"worker 1": reason}
        dialed.close()


@pytest.mark.parametrize("names_are_fixed", [False, True])
def test_a_name_that_will_never_resolve_is_given_up(monkeypatch, names_are_fixed):
    """That of a Slurm node; that of a pod may appear later."""
    monkeypatch.setattr(peers, "_MISMATCH_SECONDS", 0.1)
    credentials = doctor_credentials(ClusterSpec({"worker": ["a:1", "nowhere.invalid:1"]}))
    addresses, info = {"worker 1": "nowhere.invalid:1"}, TaskInfo("worker 0", "h", {})
    dialed = peers.PeerConnections(addresses, info, credentials, names_are_fixed=names_are_fixed)
    dialed.dial(60)
    assert dialed.wait(30 if names_are_fixed else 1) is names_are_fixed
    assert "the name nowhere.invalid does not resolve" in dialed.missing["worker 1"]
    dialed.close()
