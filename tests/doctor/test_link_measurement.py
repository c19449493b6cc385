"""Two network namespaces as hosts, with links of known bandwidth and a firewall."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import network_namespaces
import pytest
from child_environment import child_environment

SCRIPT = Path(__file__).with_name("checked_task.py")
RATES = {0: 100e6, 1: 50e6}  # what each host sends at most, bits a second


@pytest.fixture(scope="module")
def hosts():
    if reason := network_namespaces.why_not():
        pytest.skip(reason)
    if shutil.which("tc") is None:
        pytest.skip("there is no tc (iproute2)")
    with network_namespaces.two_hosts() as pair:
        for index, host in enumerate(pair):
            limit = ["rate", f"{RATES[index]:.0f}bit", "burst", "64kb", "latency", "50ms"]
            command = [
                "ip",
                "netns",
                "exec",
                host.namespace,
                "tc",
                "qdisc",
                "add",
                "dev",
                host.interface,
                "root",
                "tbf",
            ]
            shaped = subprocess.run([*command, *limit], capture_output=True, text=True, timeout=30)
            if shaped.returncode:
                pytest.skip(f"this host shapes no links: {shaped.stderr.strip()}")
        yield pair


def checked(hosts, timeout="10"):
    """Returns what each of the two tasks prints."""
    addresses = [f"{host.address}:2222" for host in hosts]
    started = []
    try:
        for index, host in enumerate(hosts):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            environ = child_environment(TF_CONFIG=json.dumps(config))
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            started.append(host.start([sys.executable, str(SCRIPT), timeout], env=environ, **pipes))
        outputs = [process.communicate(timeout=60) for process in started]
        assert [process.returncode for process in started] == [0, 0], outputs
        return [json.loads(output) for output, _ in outputs]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_bandwidth_and_round_trip_of_a_shaped_link(hosts):
    report, summary = checked(hosts)
    [link] = report["links"]
    for measured, rate in ((link["bytes_per_second"], RATES[0]), (link["bytes_per_second_back"], RATES[1])):
        assert 0.8 * rate < 8 * measured < 1.05 * rate  # a twentieth of it are the headers of TCP
    assert 0 < link["round_trip_seconds"] < 0.02
    assert abs(link["clock_offset_seconds"]) <= link["clock_uncertainty_seconds"] + 1e-3
    assert report["compression"]["suggestion"] == "powersgd:4"
    assert (report["verdict"], summary) == ("ok", {"chief": "worker 0", "errors": 0, "warnings": 0})


def test_a_firewall_between_hosts(hosts):
    """Worker 1 cannot answer worker 0: both report it."""
    table = f"ip netns exec {hosts[1].namespace}".split()
    blackhole = [*table, "ip", "route", "replace", "blackhole", f"{hosts[0].address}/32"]
    subprocess.run(blackhole, check=True, timeout=30)
    try:
        first, second = checked(hosts, timeout="0")
    finally:
        subprocess.run([*table, "ip", "route", "del", "blackhole", f"{hosts[0].address}/32"], check=True, timeout=30)
    [silent] = [x for x in first["findings"] if x["check"] == "peers"]
    assert "worker 1 at 10.77.0.2:2222 did not answer worker 0: no answer in 1 s" in silent["found"]
    [unreachable] = [x for x in second["findings"] if x["check"] == "peers"]
    assert "worker 0 at 10.77.0.1:2222 did not answer worker 1" in unreachable["found"]
    assert first["verdict"] == second["verdict"] == "error"
