"""What the exit of a chief and of a parameter server means, and how all tasks are started."""

import json
import re

import pytest
from role_runs import ALL, QUICK, of

from tfdist.utils.cores_and_ports import ThreadShare, usable_cores


def test_tasks_labels_logs_and_threads(run_roles, tmp_path):
    show = "print(os.environ['TF_CONFIG'], os.environ['TF_NUM_INTRAOP_THREADS'])"
    ended = run_roles(f"{show}; up(*{ALL!r})", "--log-dir", "logs", server=f"{' ' * 8}{show}")
    assert ended.code == 0
    assert all((tmp_path / f"told-{task}").exists() for task in ALL), "the exit of the chief ends the others"
    assert not any("failed" in line or "ended" in line for line in ended.said)
    shown = {}
    for label, name in (("chief", "chief"), ("worker 0", "worker-0"), ("worker 1", "worker-1"), ("ps 0", "ps-0")):
        [line] = of(ended, label)
        assert (tmp_path / "logs" / f"{name}.log").read_text() == line + "\n"
        shown[label] = json.loads(line.rpartition(" ")[0])
        assert int(line.rpartition(" ")[2]) == max(1, usable_cores() // 4)
    assert len(list((tmp_path / "logs").iterdir())) == 4
    assert [config["task"] for config in shown.values()] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
        {"type": "ps", "index": 0},
    ]
    [cluster] = {json.dumps(config["cluster"]) for config in shown.values()}
    assert {job: len(addresses) for job, addresses in json.loads(cluster).items()} == {"chief": 1, "worker": 2, "ps": 1}
    assert len({address for addresses in json.loads(cluster).values() for address in addresses}) == 4
    assert ended.said[0].startswith("1 chief, 2 workers, 1 parameter server, ")


def test_cores_are_shared_among_all(run_roles):
    ended = run_roles("print(os.environ['TF_NUM_INTRAOP_THREADS'])", workers=1)
    assert of(ended, "chief") == [str(max(1, usable_cores() // 3))]
    who = "1 chief, 1 worker, 1 parameter server"
    assert ended.said[0] == ThreadShare(3, usable_cores(), None, {}, who=who).describe()


def test_errors_after_the_exit_of_the_chief_are_no_failure(run_roles):
    server = """
        def leave(*_):
            beat(error={"type": "KeyError", "message": "late"})
            raise KeyError("late")
        signal.signal(signal.SIGTERM, leave)
    """
    ended = run_roles(f"up(*{ALL!r})", server=server)
    assert ended.code == 0
    assert not any("failed" in line for line in ended.said)


def test_failure_of_the_chief(run_roles):
    ended = run_roles(f"up(*{ALL!r}); print('the cause'); sys.exit(3)")
    assert ended.code == 3
    assert ended.said[-2:] == ["chief failed first: exit code 3. Its last lines:", "  | the cause"]


@pytest.mark.parametrize(
    ("way", "code", "reason"),
    [
        ("die()", 137, "killed by SIGKILL (possibly the OOM killer)"),
        ("os._exit(4)", 4, "exit code 4"),
        ("os._exit(0)", 1, "exit code 0, while it was needed"),
    ],
)
def test_any_exit_of_a_parameter_server_is_a_failure(run_roles, tmp_path, way, code, reason):
    server = f"""
        if JOB == "ps":
            up("worker-0", "worker-1")
            {way}
    """
    ended = run_roles("hang()", "--error-file", "error.json", server=server)
    assert ended.code == code
    entry = json.loads((tmp_path / "error.json").read_text())
    assert {end["task"] for end in entry["exits"]} == {"chief", "worker 0", "worker 1", "ps 0"}
    assert (entry["workers"], entry["cause"]["task"], entry["cause"]["description"]) == (2, "ps 0", reason)
    assert ended.said[-1] == f"ps 0 failed first: {reason}. It printed nothing."
    assert {line for line in ended.said if "worker" in line and "ended" in line} == {
        f"worker {index} ended after that: exit code 0" for index in (0, 1)
    }


def test_all_are_restarted_after_the_loss_of_a_parameter_server(run_roles):
    server = """
        print(os.environ["TF_CONFIG"])
        if JOB == "ps" and ATTEMPT == 0:
            up("worker-0", "worker-1")
            die()
    """
    script = """
        beat(step=1)
        if ATTEMPT == 0: hang()
        up("worker-0-of-attempt-1", "worker-1-of-attempt-1", "ps-0-of-attempt-1")
    """
    ended = run_roles(script, "--max-restarts", "1", "--restart-delay", "0", server=server)
    assert ended.code == 0
    assert "restart 1 of 1 at once with 2 workers" in ended.said
    assert [len(set(of(ended, label))) for label in ("worker 0", "worker 1", "ps 0")] == [2, 2, 2], "fresh ports"


@pytest.mark.parametrize("name", ["chief", "ps 0"])
def test_frozen_chief_or_parameter_server_is_a_failure(run_roles, name):
    server = """
        if JOB == "ps":
            beat()
    """
    script = "beat(step=5); hang()" if name == "chief" else "hang()"
    ended = run_roles(script, *QUICK, server=server if name == "ps 0" else "")
    step = " (last step 5)" if name == "chief" else ""
    assert ended.code == 137
    assert f"{name} is frozen: no heartbeat for 1 s{step}" in ended.said
    assert ended.said[-1] == f"{name} failed first: frozen: no heartbeat for 1 s{step}. It printed nothing."


@pytest.mark.parametrize("how", ["die()", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_lost_parameter_server_is_the_cause_though_the_chief_failed_of_it_first(run_roles, how):
    server = f"""
        if JOB == "ps":
            beat()
            note("beaten")
            wait_for("pid-chief-0-life-0")
            if "die" in {how!r}:
                wait_ended("pid-chief-0-life-0")
            {how}
    """
    script = """
        wait_for("beaten")
        raise RuntimeError("UnavailableError: failed to connect to all addresses")
    """
    ended = run_roles(script, "--heartbeat-timeout", "3", "--grace", "5", server=server)
    assert ended.code == 137
    [cause] = [line for line in ended.said if "failed first" in line]
    assert cause.startswith("ps 0 failed first: ")


def test_lost_peer_of_the_chief_is_reported_if_there_is_no_other_failure(run_roles):
    ended = run_roles(f"up(*{ALL!r}); raise RuntimeError('Socket closed')", "--grace", "0.3")
    assert ended.code == 1
    assert "chief failed first: exit code 1. Its last lines:" in ended.said


def test_error_of_a_signalled_worker_is_not_the_cause(run_roles):
    server = """
        def leave(*_):
            raise KeyError("late")
        signal.signal(signal.SIGTERM, leave if JOB == "worker" else lambda *_: os._exit(0))
    """
    ended = run_roles(f"up(*{ALL!r}); raise RuntimeError('Socket closed')", "--grace", "0.3", server=server)
    assert ended.code == 1
    assert "chief failed first: exit code 1. Its last lines:" in ended.said


def test_steps_come_from_the_chief_alone(run_roles):
    """Workers that claim to make steps do not hide that the training stalls."""
    server = """
        if JOB == "worker":
            for step in range(10**6):
                beat(step=step)
                time.sleep(0.02)
    """
    script = """
        beat(step=2)
        beat_on(step=3)
    """
    ended = run_roles(script, "--stall-timeout", "1", server=server)
    assert ended.code == 1
    # More than 1 s if the two steps were far apart.
    assert any(re.fullmatch(r"no worker made a step for \d+ s \(last steps: 3\)", line) for line in ended.said)


def test_only_the_chief_has_a_warm_spare(run_roles, tmp_path):
    fake = "        for name in ('tensorflow', 'keras'): (HERE / f'{name}.py').write_text('')"
    script = f"""
{fake}
        beat(step=1), beat(step=2), beat(step=3)
        print("spare" if "warm_spare_main" in " ".join(sys.orig_argv) else "new")
        if ATTEMPT == 0:
            spares = lambda: [pid for pid in children() if "warm_spare_main" in cmdline(pid)]
            wait_until(spares)
            time.sleep(1.0)  # time in which there would be more
            note("spares", len(spares()))
            die()
    """
    helper = """
        def children():
            return pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        def cmdline(pid):
            try:
                return pathlib.Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                return ""
    """
    options = ("--max-restarts", "1", "--restart-delay", "0", "--warm-spares")
    ended = run_roles(helper + script, *options)
    assert (ended.code, of(ended, "chief")) == (0, ["new", "spare"])
    assert (tmp_path / "spares").read_text() == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-workers", "1"), "does not apply to workers beside.*--min-workers 1 --parameter-servers 1.*Remove it"),
        (("--parameter-servers", "0", "--worker-restarts", "1"), "--worker-restarts 1 without --parameter-servers"),
        (("--chief",), "Received: --chief --parameter-servers 1. Expected: one of them"),
    ],
)
def test_options_that_do_not_go_together(run_roles, options, message):
    ended = run_roles("pass", *options, env={"TFDIST_TOKEN": "0123456789abcdef"})
    assert ended.code == 2
    assert re.search(message, ended.err[-1])
