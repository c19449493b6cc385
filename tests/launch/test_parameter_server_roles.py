"""A chief that runs the script, workers that come and go, and parameter servers that must stay.

Where the launcher starts `tfdist.parameter_server`, a plain script of the test runs instead: `sitecustomize` of a
directory on PYTHONPATH sees what the interpreter was asked for.
"""

import json
import os
import re
import signal

import pytest

from tfdist.launch.cores import ThreadShare, usable_cores

_SITE = """
import os, sys
if sys.orig_argv[1:] == ["-m", "tfdist.parameter_server"]:
    os.execv(sys.executable, [sys.executable, os.path.join(os.getcwd(), "server.py")])
"""

# What chief and servers see beside the helper of all launch tests. A process that is started again has another life.
_TASK = """
from worker import *
JOB, INDEX = (json.loads(os.environ["TF_CONFIG"])["task"][key] for key in ("type", "index"))
TASK = f"{JOB}-{INDEX}" if ATTEMPT == 0 else f"{JOB}-{INDEX}-of-attempt-{ATTEMPT}"
LIFE = len(list(HERE.glob(f"pid-{TASK}-life-*")))
note(f"pid-{TASK}-life-{LIFE}", os.getpid())

def kill(task, life=0):
    wait_for(f"up-{task}-life-{life}")
    os.kill(int((HERE / f"pid-{task}-life-{life}").read_text()), signal.SIGKILL)

def up(*tasks, life=0):
    for task in tasks:
        wait_for(f"up-{task}-life-{life}")
"""

_SERVE = """
from task import *
def leave(*_):
    note(f"told-{TASK}")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
def serve():
    note(f"up-{TASK}-life-{LIFE}")
    hang()
"""

ALL = ("worker-0", "worker-1", "ps-0")
QUICK = ("--heartbeat-timeout", "1", "--grace", "0.5")


@pytest.fixture
def begin(start, tmp_path):
    """`begin(chief's script, *options, server=script)`: 2 workers and 1 parameter server."""

    def begin(script, *options, server="", workers=2, servers=1, **more):
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_SITE)
        (tmp_path / "task.py").write_text(_TASK)
        lines = [line.removeprefix(" " * 8) for line in server.splitlines()]
        (tmp_path / "server.py").write_text(_SERVE + "\n".join([*lines, "serve()"]))
        root = os.environ.get("PYTHONPATH", "")
        env = {"PYTHONPATH": f"{site}:{_root()}:{root}", **more.pop("env", {})}
        chief = "from task import *\n" + "\n".join(line.removeprefix(" " * 8) for line in script.splitlines())
        return start(chief, "--parameter-servers", str(servers), *options, workers=workers, env=env, **more)

    return begin


def _root():
    import tfdist

    return os.path.dirname(os.path.dirname(tfdist.__file__))


@pytest.fixture
def run_roles(begin):
    return lambda *arguments, **options: begin(*arguments, **options).end()


def of(ended, label):
    return [line.removeprefix(f"[{label}] ") for line in ended.out if line.startswith(f"[{label}] ")]


def lines_of(ended, name):
    return [line for line in ended.said if line.startswith(f"{name} ")]


def test_tasks_labels_logs_and_threads(run_roles, tmp_path):
    show = "print(os.environ['TF_CONFIG'], os.environ['TF_NUM_INTRAOP_THREADS'])"
    ended = run_roles(f"{show}; up(*{ALL!r})", "--log-dir", "logs", server=f"{' ' * 8}{show}")
    assert ended.code == 0
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


def test_end_of_the_chief_ends_the_others(run_roles, tmp_path):
    ended = run_roles(f"up(*{ALL!r})")
    assert ended.code == 0
    assert all((tmp_path / f"told-{task}").exists() for task in ALL)
    assert not any("failed" in line or "ended" in line for line in ended.said)


def test_what_goes_wrong_after_the_end_of_the_chief_is_no_failure(run_roles):
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
        ("die()", 137, "killed by SIGKILL (if nobody did so by hand: often the kernel, out of memory)"),
        ("os._exit(4)", 4, "exit code 4"),
        ("os._exit(0)", 1, "exit code 0, while it was needed"),
    ],
)
def test_any_end_of_a_parameter_server_is_a_failure(run_roles, way, code, reason):
    server = f"""
        if JOB == "ps":
            up("worker-0", "worker-1")
            {way}
    """
    ended = run_roles("hang()", server=server)
    assert ended.code == code
    assert ended.said[-1] == f"ps 0 failed first: {reason}. It printed nothing."
    assert {line for line in ended.said if "worker" in line and "ended" in line} == {
        f"worker {index} ended after that: exit code 0" for index in (0, 1)
    }


def test_error_file_names_the_task(run_roles, tmp_path):
    server = "        if JOB == 'ps': os._exit(4)"
    run_roles("hang()", "--error-file", "error.json", server=server)
    said = json.loads((tmp_path / "error.json").read_text())
    assert {end["task"] for end in said["ends"]} == {"chief", "worker 0", "worker 1", "ps 0"}
    assert (said["workers"], said["cause"]["task"], said["cause"]["description"]) == (2, "ps 0", "exit code 4")


def test_all_are_started_again_after_the_loss_of_a_parameter_server(run_roles):
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


def test_killed_worker_is_started_again_alone(run_roles, tmp_path):
    script = """
        up("ps-0", "worker-0")
        kill("worker-1")
        up("worker-1", life=1)
    """
    server = "        print(LIFE, os.environ['TF_CONFIG'], ATTEMPT)"
    ended = run_roles(script, "--log-dir", "logs", server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: killed by SIGKILL (if nobody did so by hand: often the kernel, out of memory); the training "
        "goes on without it; started again in 1 s"
    ]
    first, second = of(ended, "worker 1")
    assert (first[0], second[0]) == ("0", "1") and first[1:] == second[1:], "the same TF_CONFIG"
    assert (len(of(ended, "worker 0")), len(of(ended, "ps 0"))) == (1, 1)
    assert (tmp_path / "logs" / "worker-1.log").read_text() == f"{first}\n{second}\n"


def test_worker_that_ends_well_is_started_again_too(run_roles):
    ended = run_roles(
        "up('worker-0', life=1)", server="        if JOB == 'worker' and LIFE == 0: os._exit(0)", workers=1
    )
    assert ended.code == 0
    assert lines_of(ended, "worker 0") == [
        "worker 0 ended: exit code 0; the training waits for it; started again in 1 s"
    ]


def test_frozen_worker_is_killed_and_started_again(run_roles):
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 1, 0):
            beat()
        if (JOB, INDEX, LIFE) == ("worker", 1, 1):
            os._exit(5)
    """
    ended = run_roles("up('worker-1', life=2)", *QUICK, server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: frozen: no heartbeat for 1 s; the training goes on without it; started again in 1 s",
        "worker 1 failed: exit code 5; the training goes on without it; started again in 2 s",
    ]


def test_worker_started_again_is_judged_anew(run_roles):
    """The silence of the former is not its own."""
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 1, 0):
            beat()
            die()
        if (JOB, INDEX) == ("worker", 1):
            note("second")
    """
    script = """
        wait_for("second")
        time.sleep(1.5)  # time in which it would be found frozen
    """
    ended = run_roles(script, *QUICK, server=server)
    assert ended.code == 0
    assert not any("frozen" in line for line in ended.said)


def test_error_that_a_worker_tells_of_does_not_end_the_attempt(run_roles):
    server = """
        if (JOB, LIFE) == ("worker", 0):
            beat(error={"type": "KeyError", "message": "'x'"})
            note(f"told-of-{INDEX}")
    """
    script = """
        wait_for("told-of-0"), wait_for("told-of-1")
        time.sleep(1.0)  # twice the grace, after which the launcher would end all
        print("through")
    """
    ended = run_roles(script, "--grace", "0.5", server=server)
    assert (ended.code, of(ended, "chief")) == (0, ["through"])


def test_workers_do_not_use_up_restarts(run_roles):
    script = """
        if ATTEMPT == 0:
            for task in ("worker-0", "worker-1"):
                kill(task)
            up("worker-0", "worker-1", life=1)
            beat(step=1)
            die()
    """
    ended = run_roles(script, "--max-restarts", "1", "--restart-delay", "0")
    assert ended.code == 0
    assert "restart 1 of 1 at once with 2 workers" in ended.said


def test_bounded_restarts_of_a_worker(run_roles):
    server = "        if (JOB, INDEX) == ('worker', 1): os._exit(5)"
    script = "up('worker-0', 'ps-0'); wait_for('pid-worker-1-life-1'); wait_gone_of('worker-1', 1)"
    helper = """
        def wait_gone_of(task, life):
            stat = pathlib.Path("/proc", (HERE / f"pid-{task}-life-{life}").read_text(), "stat")
            wait_until(lambda: not stat.exists())
    """
    ended = run_roles(helper + "\n        " + script, "--worker-restarts", "1", server=server)
    assert ended.code == 0
    assert lines_of(ended, "worker 1") == [
        "worker 1 failed: exit code 5; the training goes on without it; started again in 1 s",
        "worker 1 failed: exit code 5; not started again (--worker-restarts 1)",
    ]


def test_the_attempt_fails_when_no_worker_is_left(run_roles):
    server = """
        if JOB == "worker":
            up("ps-0")
            print("last words")
            os._exit(5)
    """
    ended = run_roles("hang()", "--worker-restarts", "0", server=server)
    assert ended.code == 5
    last = next(line for line in ended.said if "failed first" in line)
    assert last.endswith("failed first: exit code 5; no worker is left (--worker-restarts 0). Its last lines:")
    assert last.startswith("worker ")
    assert "  | last words" in ended.said
    assert "chief ended after that: killed by SIGTERM" in ended.said


def test_what_a_worker_leaves_behind_is_killed(run_roles):
    server = """
        if (JOB, INDEX, LIFE) == ("worker", 0, 0):
            grandchild("child", "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('child-up'); hang()")
            wait_for("child-up")
            os._exit(5)
    """
    script = """
        wait_for("child-up")
        stat = pathlib.Path("/proc", (HERE / "pid-child").read_text(), "stat")
        wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
        up("worker-0", life=1)
    """
    assert run_roles(script, "--grace", "60", server=server).code == 0


def test_worker_that_left_someone_with_its_output_is_started_again(run_roles):
    """A process of another session holds the pipes of the former worker."""
    server = """
        if (JOB, LIFE) == ("worker", 0):
            grandchild(f"child-{INDEX}", start_new_session=True)
            os._exit(5)
        print("again")
    """
    ended = run_roles("up('worker-0', 'worker-1', life=1)", server=server)
    assert (ended.code, of(ended, "worker 0"), of(ended, "worker 1")) == (0, ["again"], ["again"])


@pytest.mark.parametrize("how", ["die()", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_lost_parameter_server_is_the_cause_though_the_chief_failed_of_it_first(run_roles, how):
    server = f"""
        if JOB == "ps":
            beat()
            note("beaten")
            wait_for("pid-chief-0-life-0")
            stat = pathlib.Path("/proc", (HERE / "pid-chief-0-life-0").read_text(), "stat")
            if "die" in {how!r}:
                wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")
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


def test_echo_of_the_chief_alone_is_reported(run_roles):
    ended = run_roles(f"up(*{ALL!r}); raise RuntimeError('Socket closed')", "--grace", "0.3")
    assert ended.code == 1
    assert "chief failed first: exit code 1. Its last lines:" in ended.said


def test_error_of_a_worker_that_is_told_to_end_is_not_the_cause(run_roles):
    server = """
        def leave(*_):
            raise KeyError("late")
        signal.signal(signal.SIGTERM, leave if JOB == "worker" else lambda *_: os._exit(0))
    """
    ended = run_roles(f"up(*{ALL!r}); raise RuntimeError('Socket closed')", "--grace", "0.3", server=server)
    assert ended.code == 1
    assert "chief failed first: exit code 1. Its last lines:" in ended.said


SAVES = """
        def save(*_):
            {save}
            os._exit(75)
        signal.signal(signal.SIGTERM, save)
        note("ready")
        hang()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_only_the_chief_is_told_while_it_saves(begin, tmp_path, name):
    save = f"time.sleep(0.5); note('early', [task for task in {ALL!r} if (HERE / ('told-' + task)).exists()])"
    run = begin(SAVES.format(save=save))
    run.wait_for("ready", *(f"up-{task}-life-0" for task in ALL))
    run.process.send_signal(signal.Signals[name])
    ended = run.end()
    assert ended.code == 75
    assert (tmp_path / "early").read_text() == "[]"
    assert all((tmp_path / f"told-{task}").exists() for task in ALL)
    assert ended.said[-1] == "preempted: all workers saved and left (exit code 75)"


def test_worker_that_dies_while_the_chief_saves_is_started_again(begin):
    run = begin(SAVES.format(save="kill('worker-0'); kill('worker-1'); up('worker-0', life=1)"))
    run.wait_for("ready", "up-worker-0-life-0", "up-worker-1-life-0")
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 75


def test_chief_told_by_someone_else_is_started_again_with_all(run_roles):
    script = f"""
        if ATTEMPT == 0:
            up(*{ALL!r})
            os._exit(75)
    """
    ended = run_roles(script, "--max-restarts", "1", "--restart-delay", "0")
    assert ended.code == 0
    assert "restart 1 of 1 at once with 2 workers" in ended.said


def test_chief_that_does_not_save_in_time_is_killed_with_all(begin):
    run = begin(SAVES.format(save="time.sleep(60)"), "--grace", "0.3")
    run.wait_for("ready", *(f"up-{task}-life-0" for task in ALL))
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 143


def test_second_signal_kills_all(begin, tmp_path):
    run = begin(SAVES.format(save="note('saving'); time.sleep(60)"))
    run.wait_for("ready", *(f"up-{task}-life-0" for task in ALL))
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("saving")
    run.process.send_signal(signal.SIGTERM)
    assert run.end().code == 143
    assert not any((tmp_path / f"told-{task}").exists() for task in ALL)


def test_steps_come_from_the_chief_alone(run_roles):
    """Workers that claim to make steps do not hide that the training stands still."""
    server = """
        if JOB == "worker":
            for step in range(10**6):
                beat(step=step)
                time.sleep(0.02)
    """
    script = """
        for step in (1, 2, 3):
            beat(step=step)
        beat_on(step=3)
    """
    ended = run_roles(script, "--stall-timeout", "1", server=server)
    assert ended.code == 1
    assert "no worker made a step for 1 s (last steps: 3)" in ended.said


def test_only_the_chief_has_a_warm_spare(run_roles, tmp_path):
    fake = "        for name in ('tensorflow', 'keras'): (HERE / f'{name}.py').write_text('')"
    script = f"""
{fake}
        beat(step=1), beat(step=2), beat(step=3)
        print("spare" if "spare_main" in " ".join(sys.orig_argv) else "new")
        if ATTEMPT == 0:
            spares = lambda: [pid for pid in children() if "spare_main" in cmdline(pid)]
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
        (("--min-workers", "1"), "come and go by themselves.*--min-workers 1 --parameter-servers 1.*Leave it out"),
        (("--parameter-servers", "0", "--worker-restarts", "1"), "--worker-restarts 1 without --parameter-servers"),
        (("--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1"), "Parameter servers run on one host"),
    ],
)
def test_options_that_do_not_go_together(run_roles, options, message):
    ended = run_roles("pass", *options, env={"TFDIST_TOKEN": "0123456789abcdef"})
    assert ended.code == 2
    assert re.search(message, ended.err[-1])
