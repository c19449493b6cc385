"""Tasks wait for each other with a limit, in any order, and leave their ports free."""

import socket
import sys
import threading

import pytest

from tfdist.cluster import wait_for_peers
from tfdist.utils.cores_and_ports import ReservedPorts

waiting = sys.modules["tfdist.cluster.wait_for_peers"]  # the function has the same name


def free_ports(count):
    with ReservedPorts(count) as reserved:
        return reserved.ports


def wait_all(ports, results):
    """One thread a task; each, having seen the others, opens its port as TensorFlow's server would."""
    servers = []

    def task(index):
        peers = {f"worker {other}": f"127.0.0.1:{port}" for other, port in enumerate(ports) if other != index}
        try:
            wait_for_peers(f"127.0.0.1:{ports[index]}", peers, timeout_seconds=30)
            servers.append(socket.create_server(("", ports[index])))
            results[index] = "complete"
        except OSError as error:
            results[index] = error

    return [threading.Thread(target=task, args=(index,)) for index in range(len(ports))], servers


def test_all_tasks_see_each_other_and_can_open_their_ports_afterwards():
    ports, results = free_ports(4), {}
    threads, servers = wait_all(ports, results)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for server in servers:
        server.close()
    assert results == dict.fromkeys(range(4), "complete")


def test_a_missing_task_is_named_and_the_present_one_is_not():
    own, present, absent = free_ports(3)
    with socket.create_server(("127.0.0.1", present)):
        peers = {"worker 1": f"127.0.0.1:{present}", "worker 2": f"127.0.0.1:{absent}"}
        with pytest.raises(TimeoutError, match=r"not complete after 3 s.*worker 2 at 127.0.0.1:\d+ \(") as caught:
            wait_for_peers(f"127.0.0.1:{own}", peers, timeout_seconds=3)
    assert "worker 1" not in str(caught.value)
    socket.create_server(("", own)).close()  # free again


def test_a_host_that_does_not_exist_is_named():
    (own,) = free_ports(1)
    with pytest.raises(TimeoutError, match="worker 1 at nowhere.invalid:1"):
        wait_for_peers(f"127.0.0.1:{own}", {"worker 1": "nowhere.invalid:1"}, timeout_seconds=0.2)


def test_a_fixed_name_that_does_not_resolve_ends_the_wait(monkeypatch):
    """Under Slurm it never will; that of a pod may appear later."""
    monkeypatch.setattr(waiting, "_NAME_SECONDS", 0.1)
    (own, silent) = free_ports(2)
    peers = {"worker 1": "nowhere.invalid:1", "worker 2": f"127.0.0.1:{silent}"}
    with pytest.raises(OSError, match=r"do not resolve on \S+. Received: worker 1 at nowhere.invalid:1. Expected"):
        wait_for_peers(f"127.0.0.1:{own}", peers, timeout_seconds=60, names_are_fixed=True)


def test_a_taken_port_is_named():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=rf"in use. Received: port {port}.*Expected: .*TF_CONFIG;.*TFDIST_PORT"):
            wait_for_peers(f"127.0.0.1:{port}", {"worker 1": "127.0.0.1:1"}, timeout_seconds=1)


@pytest.mark.parametrize("timeout_seconds", [float("nan"), float("inf"), -1, True, "5", None], ids=str)
def test_timeout_is_checked(timeout_seconds):
    with pytest.raises(ValueError, match=r"Invalid `timeout_seconds`. Received: timeout_seconds=.*number of seconds"):
        wait_for_peers("localhost:0", {}, timeout_seconds=timeout_seconds)
