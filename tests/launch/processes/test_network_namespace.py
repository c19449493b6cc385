import ctypes
import os
import shutil
import socket
import subprocess

import pytest
from role_runs import of

from tfdist.launch.processes import network_namespace

SERVE = """
    import socket
    if RANK == 0:
        server = socket.create_server(("", int(sys.argv[1]) if sys.argv[1:] else 0))
        note("port", server.getsockname()[1])
        connection, _ = server.accept()
        print(connection.recv(10).decode())
        note("done")
    else:
        wait_for("port")
        wait_for("go")
        socket.create_connection(("127.0.0.1", int((HERE / "port").read_text()))).send(b"hello")
        wait_for("done")
"""
CAP_SYS_ADMIN = 21
PR_CAPBSET_DROP = 24


def is_permitted(*flags):
    """Uses util-linux, so that a launcher that fails to do so does not skip its test."""
    command = ["unshare", *flags, "ip", "link", "set", "lo", "up"]
    return all(map(shutil.which, ("unshare", "ip"))) and subprocess.run(command, capture_output=True).returncode == 0


needs_private = pytest.mark.skipif(not is_permitted("-n"), reason="this host does not permit network namespaces")
needs_user = pytest.mark.skipif(not is_permitted("-Urn"), reason="this host does not permit user namespaces")


def drop_sys_admin():
    """Between fork and exec: root without the capability, as in a container."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)


@needs_private
def test_private_network_cannot_be_reached_from_outside(start):
    with socket.socket() as holder:  # nobody listens on this port of the host
        holder.bind(("127.0.0.1", 0))
        address = holder.getsockname()
        run = start(SERVE, "--network", "private", arguments=[str(address[1])])
        run.wait_for("port")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    (run._here / "go").touch()
    ended = run.end()
    assert (ended.code, ended.of(0)) == (0, ["hello"])
    assert ended.said[1].startswith("private network: only the workers") and "--network host" in ended.said[1]


@needs_private
def test_each_run_has_its_private_network(run):
    show = "print(os.readlink('/proc/self/ns/net')); print(*sorted(os.listdir('/proc/self/net/dev_snmp6')))"
    ended = run(show, "--network", "private")
    assert ended.of(0) == ended.of(1)
    assert ended.of(0)[0] != os.readlink("/proc/self/ns/net")


@pytest.mark.parametrize("mode", ["auto", "host"])
def test_workers_without_servers_have_the_network_of_the_host(start, mode):
    run = start(SERVE, "--network", mode)
    (port,) = run.wait_for("port")
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.send(b"outside")
        run.wait_for("done")
    (run._here / "go").touch()
    ended = run.end()
    assert ended.of(0) == ["outside"]
    assert not any("network" in line for line in ended.said)


@needs_private
def test_servers_have_a_private_network(run_roles):
    ended = run_roles("print(os.readlink('/proc/self/ns/net'))")
    assert ended.said[1].startswith("private network")
    assert of(ended, "chief") != [os.readlink("/proc/self/ns/net")]


@needs_user
def test_user_namespace_where_the_capability_is_missing(start):
    show = "print(os.getuid(), os.readlink('/proc/self/ns/net'))"
    run = start(show, "--network", "private", preexec_fn=drop_sys_admin)
    ended = run.end()
    assert ended.code == 0, ended.err
    assert ended.said[1].startswith("private network")
    uid, namespace = ended.of(0)[0].split()
    assert int(uid) == os.getuid()
    assert namespace != os.readlink("/proc/self/ns/net")


@pytest.fixture
def forbidden(monkeypatch):
    """Runs the launcher in a user namespace that does not permit network namespaces."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this host does not permit the user namespace that the test needs")
    prefix = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"', "sh"]
    popen = subprocess.Popen

    def prefixed(command, **options):
        return popen([*prefix, *command], **options)

    monkeypatch.setattr(subprocess, "Popen", prefixed)


@pytest.mark.usefixtures("forbidden")
def test_one_warning_where_it_is_not_permitted(run_roles):
    ended = run_roles("print('ran')")
    assert (ended.code, of(ended, "chief")) == (0, ["ran"])
    warnings = [line for line in ended.said if "warning" in line]
    assert len(warnings) == 1
    assert "host network, because a private one is not permitted here (unshare: " in warnings[0]
    assert "others can reach the workers' ports" in warnings[0]


@pytest.mark.usefixtures("forbidden")
def test_private_is_an_error_where_it_is_not_permitted(run, tmp_path):
    ended = run("note('started')", "--network", "private")
    assert ended.code == 2
    assert (
        "A private network is not permitted here. Received: --network private, and the host reports: uns"
        in ended.err[0]
    )
    assert "Use --network host" in ended.err[0]
    assert not (tmp_path / "started").exists()


@pytest.mark.usefixtures("forbidden")
def test_host_needs_no_permission(run):
    ended = run("pass", "--network", "host")
    assert ended.code == 0
    assert not any("warning" in line for line in ended.said)


def test_descriptions(monkeypatch):
    monkeypatch.setattr(network_namespace, "_denial", lambda: "no")
    assert "warning" in network_namespace.choose_network("auto", has_servers=True)
    assert "host network" in (said := network_namespace.choose_network("host", has_servers=True))
    assert "warning" not in said
    assert network_namespace.choose_network("auto", has_servers=False) == ""
