"""Checks of a machine's names, proxies and ports."""

import dataclasses
import errno
import os
import socket

import pytest
from machines import context, one, write

from tfdist.cluster import ClusterConfig, ClusterSpec, Task
from tfdist.doctor import network_checks as checks
from tfdist.doctor.network_checks import check_proxy, check_token


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, "ok"),
        ({"HTTP_PROXY": "http://p:1"}, "ok"),  # gRPC reads lower case only
        ({"http_proxy": "http://p:1"}, "error"),
        ({"https_proxy": "http://p:1"}, "error"),
        ({"grpc_proxy": "http://p:1", "no_proxy": "node0,node1"}, "ok"),
        ({"grpc_proxy": "", "http_proxy": "http://p:1"}, "ok"),
        ({"http_proxy": "http://p:1", "no_proxy": "node0"}, "error"),
        ({"http_proxy": "http://p:1", "no_grpc_proxy": "node0", "no_proxy": "node0,node1"}, "error"),
        ({"http_proxy": "http://p:1", "no_proxy": "E0, e1"}, "ok"),
    ],
)
def test_proxy(environ, level):
    workers = context("node0:1", "node1:1", environ=environ)
    servers = ClusterConfig(ClusterSpec({"worker": ["node0:1"], "ps": ["node1:1"]}), Task("worker", 0))
    assert one(check_proxy(dataclasses.replace(workers, config=servers))).level == level
    assert one(check_proxy(workers)).level == ("warning" if level == "error" else level)  # they do not use gRPC


@pytest.mark.parametrize(
    ("hosts", "environ", "levels"),
    [
        (["a:1", "b:1"], {}, ["warning"]),
        (["a:1", "b:1"], {"TFDIST_TOKEN": "secret"}, ["ok"]),
        (["a:1", "a:2"], {}, []),
        ([], {}, []),
    ],
)
def test_token(hosts, environ, levels):
    assert [finding.level for finding in check_token(context(*hosts, environ=environ))] == levels


def test_proxy_of_a_machine_alone_and_its_password():
    finding = one(check_proxy(context(environ={"http_proxy": "http://me:secret@p:1"})))
    assert finding.level == "warning" and "secret" not in str(finding)
    environ = {"http_proxy": "http://me:secret@p:1", "no_proxy": "10.0.0.0/8"}
    finding = one(check_proxy(context("10.1.0.1:1", "11.1.0.1:1", environ=environ)))
    assert "through it to 11.1.0.1" in finding.found


def resolving(monkeypatch, table):
    def getaddrinfo(host, *arguments, **options):
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in table[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_own_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "me")
    resolving(monkeypatch, {"me": ["10.0.0.1"]})
    assert one(checks.check_own_name(context())).found == "me is 10.0.0.1"
    resolving(monkeypatch, {})
    finding = one(checks.check_own_name(context()))
    assert finding.level == "warning" and "'<address> me' to /etc/hosts" in finding.remedy


@pytest.mark.parametrize(
    ("host", "other", "level", "found"),
    [
        ("own", "far", "ok", "own is 127.0.0.9, 8.8.8.8"),
        ("loop", "loop", "ok", "loop is 127.0.0.1"),
        ("loop", "far", "error", "this host's loopback"),
        ("gone", "far", "error", "Name or service not known"),
        ("far", "own", "warning", "8.8.8.8, which this machine does not have"),
    ],
)
def test_own_address(monkeypatch, host, other, level, found):
    monkeypatch.setattr(checks, "is_own", lambda address: address != "8.8.8.8")
    monkeypatch.setattr(checks, "is_loopback", lambda address: address == "127.0.0.1")
    resolving(monkeypatch, {"own": ["127.0.0.9", "8.8.8.8"], "far": ["8.8.8.8"], "loop": ["127.0.0.1"]})
    finding = one(checks.check_own_address(context(f"{host}:1", f"{other}:2")))
    assert finding.level == level and found in finding.found


def test_addresses_are_own_where_they_can_be_bound():
    assert checks.is_own("127.0.0.1") and not checks.is_own("192.0.2.1")
    with pytest.raises(OSError, match="not a hostname"):
        checks.addresses_of("a" * 300)


def test_own_port_in_the_ephemeral_range(tmp_path):
    root = write(tmp_path, {"proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n"})
    machine = context("a:40000", "b:1", root=root)
    assert checks.free_port(machine, "a", 40000).level == "warning"
    assert checks.free_port(machine, "a", 2222).level == "ok"
    assert checks.free_port(machine, "127.0.0.1", 40000).level == "ok"
    started = context("a:40000", "b:1", root=root, environ={"TFDIST_RUN_ID": "1"})
    assert checks.free_port(started, "a", 40000).level == "ok"
    assert checks.free_port(context("a:40000", root=root / "unknown"), "a", 40000).level == "ok"


def test_who_holds_a_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert any(f"process {os.getpid()} (" in holder for holder in checks.holders_of(port))
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert checks.holders_of(client.getsockname()[1]) == []  # connected, not listening


def test_a_port_of_another_user(monkeypatch):
    monkeypatch.setattr(checks, "holders_of", lambda port, root: [])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    finding = checks.taken_port(context(), 2222, OSError(errno.EADDRINUSE, "long story"))
    assert finding.found == "2222: Address already in use" and "sudo ss -ltnp 'sport = :2222'" in finding.remedy
