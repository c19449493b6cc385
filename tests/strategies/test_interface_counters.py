"""The bytes that a strategy reports are those that the network interface has sent."""

import json
import sys
from pathlib import Path

import network_namespaces
import pytest
from child_environment import child_environment

pytestmark = [pytest.mark.multi_process, pytest.mark.long]
_SCRIPT = Path(__file__).with_name("on_interface.py")
_LIMIT_SECONDS = 200


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of two workers has counted and its interface has sent, by compression."""
    if reason := network_namespaces.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("interfaces")
    with network_namespaces.two_hosts() as hosts:
        addresses = [f"{host.address}:2222" for host in hosts]
        workers = []
        try:
            for index, host in enumerate(hosts):
                config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                environment = child_environment(TF_CONFIG=json.dumps(config))
                command = [sys.executable, str(_SCRIPT), host.interface, str(folder / f"{index}.json")]
                with open(folder / f"{index}.txt", "w") as output:
                    workers.append(host.start(command, env=environment, stdout=output, stderr=output))
            codes = [worker.wait(_LIMIT_SECONDS) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert codes == [0, 0], (folder / "0.txt").read_text()[-3000:]
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(2)]


@pytest.mark.parametrize("compression", ["dense", "int8"])
def test_reported_bytes_are_those_of_the_interface(seen, compression):
    for worker in seen:
        counted = worker[compression]
        assert counted["updates"] >= 20
        assert abs(counted["sent"] / counted["wire"] - 1) < 0.02, counted


def test_int8_sends_a_quarter(seen):
    for worker in seen:
        assert 3.7 < worker["dense"]["sent"] / worker["int8"]["sent"] < 4
