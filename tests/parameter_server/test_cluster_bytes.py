"""The bytes that the strategy reports equal those of the sockets."""

import os

import pytest
from cluster_runs import run_chief

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

MODES = pytest.mark.parametrize("mode", ["Asynchronous", "Synchronous"])
WIDTH = 700


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    results = run_chief("on_cluster_bytes.py", tmp_path_factory.mktemp("interface"), servers=1)
    if results["namespace"] == os.readlink("/proc/self/ns/net"):
        pytest.skip("no network namespaces on this host: other processes use this loopback, too")
    return results


def net(seen, mode, name):
    """The difference between a large and a small model, of carried and reported bytes."""
    small, large = seen[f"{mode} {name} 8"], seen[f"{mode} {name} {WIDTH}"]
    return {key: large[key] - small[key] * large["steps"] / small["steps"] for key in ("carried", "pushed", "pulled")}


@MODES
@pytest.mark.parametrize("name", ["dense", "int8", "pull"])
def test_reported_bytes_equal_those_of_the_sockets(seen, mode, name):
    found = net(seen, mode, name)
    assert found["carried"] / (found["pushed"] + found["pulled"]) == pytest.approx(1, abs=0.05)


@MODES
def test_each_direction_separately(seen, mode):
    dense, pushed, pulled = (net(seen, mode, name) for name in ("dense", "int8", "pull"))
    saved = dense["carried"] - pushed["carried"]
    assert saved / (dense["pushed"] - pushed["pushed"]) == pytest.approx(1, abs=0.05)
    assert pushed["pushed"] / dense["pushed"] == pytest.approx(260 / 1024, rel=0.01)
    saved = dense["carried"] - pulled["carried"]
    assert saved / (dense["pulled"] - pulled["pulled"]) == pytest.approx(1, abs=0.05)
    assert pulled["pulled"] / dense["pulled"] == pytest.approx(0.5, rel=0.01)
