"""`tfdist run` finds lost peers long before silence counts; without it the other workers find them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child_environment import child_environment
from launched_runs import launch

from tfdist.utils.cores_and_ports import ReservedPorts

pytestmark = [pytest.mark.multi_process]

_SCRIPT = Path(__file__).with_name("lost_peer_program.py")
# Under `tfdist run` a silent worker counts as lost after 3600 s. A loaded host may take long to end.
_LIMIT_SECONDS = 60


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("SIGSTOP", "worker 1 failed first: frozen: stopped for 2 s"),
        pytest.param("SIGKILL", "worker 1 failed first: killed by SIGKILL", marks=pytest.mark.long),
    ],
)
def test_a_lost_peer_ends_the_run(tmp_path, how, reason):
    run = launch(tmp_path, _SCRIPT, how, options=["--workers", "2", "--heartbeat-timeout", "2"], limit_seconds=300)
    ended_at = time.time()
    assert reason in run.output
    assert run.path("exit_code").read_text() != "0"
    assert ended_at - float(run.path("lost_at").read_text()) < _LIMIT_SECONDS


@pytest.mark.long
def test_without_the_launcher_a_frozen_worker_ends_the_training_after_a_minute(tmp_path):
    with ReservedPorts(2) as reserved:
        addresses = [f"127.0.0.1:{port}" for port in reserved.ports]
    workers = []
    try:
        for index in range(2):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            command = [sys.executable, str(_SCRIPT), str(tmp_path), "SIGSTOP"]
            with (tmp_path / f"{index}.txt").open("w") as output:
                environment = child_environment(TF_CONFIG=json.dumps(config))
                workers.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        code = workers[0].wait(240)
        ended_at = time.time()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert code != 0
    # The limit is 60 s, counted from the last of the heartbeats, which are sent every half of it.
    assert 20 < ended_at - float((tmp_path / "lost_at").read_text()) < 120
