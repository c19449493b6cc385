"""Chiefs and parameter servers that are killed: rounds end as if nothing had happened, pushes are counted correctly."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from child_environment import child_environment, run_python
from training import differences

from tfdist.utils.cores_and_ports import ReservedPorts

_SCRIPT = Path(__file__).with_name("on_parameter_servers.py")
_LIMIT_SECONDS = 1200
pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(2700)]


def run(folder, kind, plan=()):
    """Runs the script under `tfdist run`; returns the output of both."""
    folder.mkdir(exist_ok=True)
    roles = ["--workers", "2", "--parameter-servers", "1", "--heartbeat-timeout", "5"]
    launcher = ["-m", "tfdist.launch", "run", *roles, "--max-restarts", str(len(plan))]
    finished = run_python(*launcher, _SCRIPT, folder, json.dumps(plan), kind, limit_seconds=_LIMIT_SECONDS)
    assert finished.stdout.count("fault: ") == len(plan), "every fault has struck"
    return finished.stdout + finished.stderr


def result(folder):
    return dict(np.load(folder / "result.npz"))


@pytest.mark.long
def test_rounds_end_as_if_nothing_had_happened(tmp_path):
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "disturbed"
    run(undisturbed, "rounds")
    plan = [
        {"whom": "chief", "at": "on_train_batch_end", "count": 5, "do": "SIGKILL"},
        {"whom": "ps", "at": "on_train_batch_end", "count": 5, "do": "SIGKILL"},  # after step 8
        {"whom": "chief", "at": "on_train_batch_end", "count": 3, "do": "SIGTERM"},  # after step 9, which saves anyway
        {"whom": "chief", "at": "fsync", "count": 4, "do": "SIGKILL"},
    ]
    said = run(folder, "rounds", plan)
    assert "chief failed first: killed by SIGKILL" in said and "ps 0 failed first: killed by SIGKILL" in said
    assert "chief was preempted: it saved and exited" in said
    expected, found = result(undisturbed), result(folder)
    # What workers did depends on chance; in the newest process they did what came after the newest checkpoint.
    assert sum(expected.pop("steps of workers")) == 2 * expected["optimizer 0 iteration"]
    assert sum(found.pop("steps of workers")) < 2 * found["optimizer 0 iteration"]
    for seconds in (expected.pop("seconds of workers"), found.pop("seconds of workers")):
        assert seconds[:, 0].min() > 0, "at work"
        assert 0 < seconds[:, 1].sum() < seconds[:, 0].sum(), "stalled"
    steps = [sum(values[f"history worker_{worker}_steps"] for worker in range(2)) for values in (expected, found)]
    assert steps[0].tolist() == steps[1].tolist(), "WorkerReport counts on after a restart"
    for values in (expected, found):
        for name in [name for name in values if name.startswith("history worker_")]:
            del values[name]
    assert differences(expected, found) == [], said[-3000:]


@pytest.mark.long
def test_pushes_are_counted_correctly_after_the_loss_of_a_server(tmp_path):
    said = run(tmp_path, "pushes", [{"whom": "ps", "at": "on_train_batch_end", "count": 17, "do": "SIGKILL"}])
    assert "ps 0 failed first: killed by SIGKILL" in said
    found = result(tmp_path)
    assert found["iterations"] == 30
    assert len(found["history loss"]) == 3 and found["history loss"][2] < found["history loss"][0]
    steps = sum(found[f"history worker_{worker}_steps"] for worker in range(2))
    assert steps[0] == 10 and steps[2] == 10


@pytest.mark.long
def test_without_a_launcher_fit_resumes_and_the_chief_names_a_lost_server(tmp_path):
    with ReservedPorts(3) as reserved:
        addresses = {
            job: [f"127.0.0.1:{port}"] for job, port in zip(("chief", "worker", "ps"), reserved.ports, strict=True)
        }

    def environ_of(job):
        return child_environment(TF_CONFIG=json.dumps({"cluster": addresses, "task": {"type": job, "index": 0}}))

    serve = [sys.executable, "-m", "tfdist.servers"]
    servers = [subprocess.Popen(serve, env=environ_of(job), stderr=subprocess.DEVNULL) for job in ("worker", "ps")]
    try:
        plan = [{"whom": "ps", "at": "on_train_batch_end", "count": 5, "do": "SIGKILL"}]
        chief = subprocess.run(
            [sys.executable, str(_SCRIPT), str(tmp_path), json.dumps(plan), "notebook"],
            env=environ_of("chief"),
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            check=False,
        )
    finally:
        for server in servers:
            server.kill()
            server.wait()
    assert chief.returncode == 1
    assert chief.stdout.count("interrupted") == 2
    both = dict(np.load(tmp_path / "both.npz"))
    assert len(both) == 6
    assert all(np.array_equal(both[f"arr_{index}"], both[f"arr_{index + 1}"]) for index in (0, 2, 4))
    error = chief.stderr.strip().splitlines()[-1]
    assert error.startswith("tensorflow.python.framework.errors_impl.UnavailableError: A server was lost")
    assert f"no answer from ps 0 at {addresses['ps'][0]}" in error and "FailureRecovery" in error
