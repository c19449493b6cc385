"""Warm spares, which import a file named tensorflow here and become workers that are started again."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

WARM = ("--warm-spares", "--max-restarts", "1", "--restart-delay", "0")
# Its process id tells a spare from a worker that was started cold. It draws, as libraries of TensorFlow's do.
TENSORFLOW = """
import os, pathlib, random
random.random()
here = pathlib.Path(__file__).parent
(here / f"imported-{os.getpid()}").touch()
"""
TRAINS = """
print("attempt", ATTEMPT, "warm" if "tensorflow" in sys.modules else "cold")
note(f"printed-{RANK}")
beat(step=1)
time.sleep(0.06)
beat(step=2)
if ATTEMPT == 0:
    while len([*HERE.glob("imported-*"), *HERE.glob("printed-*")]) < 4:
        beat(step=2)
        time.sleep(0.02)
    time.sleep(0.3)
    die() if RANK == 1 else hang()
"""


@pytest.fixture(autouse=True)
def tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text(TENSORFLOW)


def spares_of(run):
    with open(f"/proc/{run.process.pid}/task/{run.process.pid}/children") as listing:
        children = set(map(int, listing.read().split()))
    names = {pid: _command_line(pid) for pid in children}
    return [pid for pid, name in names.items() if "warm_spare_main.py" in name and pid not in run.pids().values()]


def _command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def test_workers_of_the_next_attempt_are_warm_and_draw_as_before(run, tmp_path):
    ended = run(f"import random\nprint(random.random()){TRAINS}", *WARM, "--seed", "5")
    assert ended.code == 0
    drawn = str(random.Random(5).random())
    assert [ended.of(rank) for rank in (0, 1)] == [[drawn, "attempt 0 cold", drawn, "attempt 1 warm"]] * 2
    imported = {int(path.name.partition("-")[2]) for path in tmp_path.glob("imported-*")}
    assert {int((tmp_path / f"pid-{rank}-of-attempt-1").read_text()) for rank in (0, 1)} <= imported


def test_worker_that_is_restarted_alone_is_warm(run):
    script = """
        print("warm" if "tensorflow" in sys.modules else "cold")
        has_died = (HERE / "dies").exists()
        for step in (1, 2):
            beat(step=step)
            time.sleep(0.06)
        if RANK == 1 and not has_died:
            wait_until(lambda: beat(step=2) or list(HERE.glob("imported-*")))
            time.sleep(0.3)
            note("dies")
            die()
        note(f"second-{RANK}")
        wait_until(lambda: beat(step=2) or (HERE / "second-1").exists())
    """
    ended = run(script, "--warm-spares", "--elastic", "1")
    assert (ended.code, ended.of(0), ended.of(1)) == (0, ["cold"], ["cold", "warm"])


def test_runs_without_spares(start, tmp_path):
    """By default; if no restart is left; and before training, when the workers' own start needs the cores."""
    script = """
        beat(step=1)
        if os.environ["TRAINS"]:
            time.sleep(0.1)
            beat(step=2)
        time.sleep(1)
    """
    runs = [
        start(script, "--max-restarts", "2", env={"TRAINS": "1"}),
        start(script, "--warm-spares", env={"TRAINS": "1"}),
        start(script, *WARM, env={"TRAINS": ""}),
    ]
    assert [run.end().code for run in runs] == [0, 0, 0]
    assert not list(tmp_path.glob("imported-*"))


def test_warm_worker_is_like_any_other(run):
    script = """
        import __main__, subprocess, threading
        class Own: pass
        def describe():
            fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]
            return {
                "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "cwd": os.getcwd(),
                "own": getattr(__main__, "Own") is Own, "stdin": sys.stdin.read(), "fds": len(fds),
                "environ": sorted(os.environ), "session": os.getsid(0) == os.getpid(),
                "python path": os.environ["PYTHONPATH"],
            }
        print(json.dumps(describe()))
        def outlive():
            threading.main_thread().join()
            print(Own.__name__)
        threading.Thread(target=outlive).start()  # ends after the script
    """ + textwrap.indent(TRAINS, " " * 8)
    ended = run(script, *WARM, arguments=["--epochs", "2"])
    assert ended.code == 0
    lines = [line for line in ended.of(0) if line.startswith("{")]
    cold, warm = map(json.loads, lines)
    assert warm.pop("fds") <= cold.pop("fds")
    assert warm == cold
    assert warm["argv"] == ["script.py", "--epochs", "2"]
    assert ended.of(0)[-2:] == ["attempt 1 warm", "Own"]


def test_exit_code_and_traceback_of_a_warm_worker(run):
    script = TRAINS + "if ATTEMPT == 1: raise KeyError('the cause')\n"
    ended = run(script, *WARM)
    assert ended.code == 1
    assert "  | KeyError: 'the cause'" in ended.said
    assert any('script.py", line' in line for line in ended.said)


def test_module(environ, tmp_path):
    program = """if True:
        import os, sys, time, socket, json, signal
        with socket.socket(fileno=os.dup(int(os.environ["TFDIST_HEARTBEAT_FD"]))) as sender:
            for step in (1, 2):
                time.sleep(0.1)
                sender.send(json.dumps({"step": step}).encode())
        print(f"{__name__} {sys.argv[1:]} {sys.path[0] == os.getcwd()} {'tensorflow' in sys.modules}")
        while os.environ["TFDIST_ATTEMPT"] == "0" and not [name for name in os.listdir() if "imported-" in name]:
            time.sleep(0.01)
        time.sleep(0.2)
        if os.environ["TFDIST_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(program)
    command = ["-m", "tfdist.launch", "run", "--workers", "1", *WARM, "-m", "package.train", "--epochs", "2"]
    ended = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environ, capture_output=True, timeout=240)
    expected = "[0] __main__ ['--epochs', '2'] True"
    assert ended.stdout.decode().splitlines() == [f"{expected} False", f"{expected} True"]


def test_spares_end_with_the_run(start, tmp_path, state):
    run = start("beat(step=1); time.sleep(0.06); beat(step=2)\nwhile not (HERE / 'go').exists(): beat(step=2)", *WARM)
    run.until(lambda: len(spares_of(run)) == 2, "two spares")
    pids = spares_of(run)
    (tmp_path / "go").touch()
    assert run.end().code == 0
    assert [state(pid) for pid in pids] == ["", ""]


def test_spares_end_with_the_run_though_the_caller_continues(environ, tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import json, os, pathlib, socket, time
        with socket.socket(fileno=os.dup(int(os.environ["TFDIST_HEARTBEAT_FD"]))) as sender:
            for step in (1, 2):
                time.sleep(0.1)
                sender.send(json.dumps({"step": step}).encode())
        while not list(pathlib.Path().glob("imported-*")):
            time.sleep(0.01)
        """)
    )
    code = f"""if True:
        from tfdist.launch.cli.main import main
        from tfdist.launch.processes.orphan_reaper import child_pids
        assert main(["run", "--workers", "1", *{WARM}, "script.py"]) == 0
        assert child_pids() == []
    """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, timeout=240)


def test_killed_launcher_takes_the_spares_with_it(start, state):
    run = start("beat(step=1); time.sleep(0.06); beat(step=2)\nbeat_on(step=2)", *WARM)
    run.until(lambda: len(spares_of(run)) == 2, "two spares")
    pids = spares_of(run)
    run.process.kill()
    run.process.communicate()
    end = time.monotonic() + 30
    while any(state(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_dead_spare_is_not_used(start, state, tmp_path):
    script = """
        beat(step=1)
        time.sleep(0.06)
        beat(step=2)
        print("attempt", ATTEMPT)
        if ATTEMPT == 0:
            while not (HERE / "go").exists():
                beat(step=2)
            die()
    """
    run = start(script, *WARM, workers=1)
    for _ in range(3):  # after which none is made any more
        run.until(lambda: len(spares_of(run)) == 1, "a spare")
        (spare,) = spares_of(run)
        os.kill(spare, signal.SIGKILL)
        run.until(lambda spare=spare: state(spare) in ("", "Z"), "its end")
    (tmp_path / "go").touch()
    ended = run.end()
    assert (ended.code, ended.of(0)) == (0, ["attempt 0", "attempt 1"])


def test_import_error_is_left_to_the_script(run, tmp_path):
    (tmp_path / "keras.py").write_text("raise RuntimeError('broken')")
    ended = run(TRAINS, *WARM)
    assert ended.code == 0
    assert ended.of(0) == ["attempt 0 cold", "attempt 1 warm"]
    assert not any("broken" in line for line in ended.err)
