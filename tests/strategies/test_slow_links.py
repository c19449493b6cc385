"""Links that a transfer keeps busy for more than 10 s do not end a training."""

import json

import network_namespaces
import pytest
from child_environment import ROOT, run_python

pytestmark = [pytest.mark.multi_process, pytest.mark.long]

_CASES = ["MultiWorkerMirroredStrategy", "ParameterServerStrategy", "ModelParallelStrategy"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By strategy, what the benchmark has measured in two or three steps at 10 Mbit/s."""
    if reason := network_namespaces.why_not():
        pytest.skip(reason)
    output = tmp_path_factory.mktemp("links") / "slow_links.json"
    command = [ROOT / "benchmarks/slow_links.py", "--seconds", "40", "--rates", "10"]
    run_python(*command, "--cases", *_CASES, "--output", output, limit_seconds=1200)
    return {run["case"]: run for run in json.loads(output.read_text())["runs"]}


@pytest.mark.parametrize("strategy", _CASES)
def test_all_steps_are_made(runs, strategy):
    seen = runs[strategy]
    assert seen["exit_code"] == 0 and seen["steps"] == seen["steps_asked"] >= 2, seen
    assert min(seen["seconds_by_step"]) > 10  # the limit of TensorFlow's coordination service by default
    assert seen["lost_packets"] > 0.002
