"""A chief runs the script, and all of its workers must stay, because they hold the stages of its model."""

import json
import re

import pytest
from role_runs import QUICK, of

from tfdist.utils.cores_and_ports import usable_cores

WORKERS = ("worker-0", "worker-1")


def test_workers_alone_see_the_gpus(run_roles):
    """TensorFlow reserves the memory of each GPU that it sees, and the chief does not compute."""
    show = "print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    more = {"server": f"{' ' * 8}{show}", "servers": 0, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    ended = run_roles(f"{show}; up(*{WORKERS!r})", **more)
    assert [of(ended, label) for label in ("chief", "worker 0", "worker 1")] == [["-1"], ["0,1"], ["0,1"]]


def test_tasks_threads_and_the_end(run_roles, tmp_path):
    show = "print(os.environ['TF_CONFIG'], os.environ['TF_NUM_INTRAOP_THREADS'])"
    pools = "assert os.environ['MALLOC_ARENA_MAX'] == '1'"
    server = f"{' ' * 8}{show}; {pools}"
    ended = run_roles(f"{show}; {pools}; up(*{WORKERS!r})", "--log-dir", "logs", server=server, servers=0)
    assert ended.code == 0
    assert all((tmp_path / f"told-{task}").exists() for task in WORKERS), "the exit of the chief ends the workers"
    assert not any("failed" in line or "ended" in line for line in ended.said)
    assert ended.said[0].startswith("1 chief, 2 workers, ")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["chief.log", "worker-0.log", "worker-1.log"]
    shown = [json.loads(of(ended, label)[0].rpartition(" ")[0]) for label in ("chief", "worker 0", "worker 1")]
    assert {int(of(ended, label)[0].rpartition(" ")[2]) for label in ("chief", "worker 0")} == {
        max(1, usable_cores() // 2)  # the chief does not compute
    }
    assert [config["task"] for config in shown] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
    assert {job: len(addresses) for job, addresses in shown[0]["cluster"].items()} == {"chief": 1, "worker": 2}
    assert shown[0]["cluster"] == shown[1]["cluster"] == shown[2]["cluster"]


@pytest.mark.parametrize(
    ("way", "code", "reason"),
    [
        ("die()", 137, "killed by SIGKILL (possibly the OOM killer)"),
        ("os._exit(0)", 1, "exit code 0, while it was needed"),
        ("beat(); hang()", 137, "frozen: no heartbeat for 1 s"),
    ],
)
def test_loss_of_a_worker_restarts_all(run_roles, way, code, reason):
    server = f"""
        if INDEX == 1 and ATTEMPT < 2:
            up("worker-0" if ATTEMPT == 0 else "worker-0-of-attempt-1")
            {way}
    """
    script = """
        beat(step=ATTEMPT, alive=False)  # whose silence is not judged
        if ATTEMPT < 2: hang()
        up("worker-0-of-attempt-2", "worker-1-of-attempt-2")
    """
    restarts = ("--max-restarts", "2", "--restart-delay", "0")
    ended = run_roles(script, *restarts, *QUICK, server=server, servers=0)
    assert ended.code == 0
    assert [line for line in ended.said if "failed first" in line] == [
        f"worker 1 failed first: {reason}. It printed nothing."
    ] * 2
    assert "restart 2 of 2 at once with 2 workers" in ended.said


def test_lost_worker_is_the_cause_though_the_chief_failed_of_it_first(run_roles):
    server = """
        if INDEX == 1:
            wait_ended("pid-chief-0-life-0")
            die()
    """
    script = "raise RuntimeError('UnavailableError: failed to connect to all addresses')"
    ended = run_roles(script, "--grace", "60", server=server, servers=0)
    assert ended.code == 137
    assert ended.said[-1].startswith("worker 1 failed first: killed by SIGKILL")


def test_preemption_ends_the_workers_after_the_chief(run_roles, tmp_path):
    script = """
        up("worker-0", "worker-1")
        def leave(*_):
            time.sleep(0.3)
            assert not list(HERE.glob("told-*"))
            os._exit(75)
        signal.signal(signal.SIGTERM, leave)
        os.kill(os.getppid(), signal.SIGTERM)
        hang()
    """
    ended = run_roles(script, servers=0)
    assert ended.code == 75
    assert all((tmp_path / f"told-{task}").exists() for task in WORKERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-workers", "1"), "Received: --chief --min-workers 1. Expected: no --min-workers"),
        (("--worker-restarts", "1"), "--worker-restarts 1 without --parameter-servers"),
    ],
)
def test_options_that_do_not_go_together(run_roles, options, message):
    ended = run_roles("pass", *options, servers=0)
    assert ended.code == 2
    assert re.search(message, ended.err[-1])
