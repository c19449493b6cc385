"""Workers of `from_notebook` end at an interrupt, and with the process that started them."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from child_environment import child_environment

pytest.importorskip("cloudpickle", reason="needs the extra `notebook`")
LIMIT_SECONDS = 240

PROGRAM = """
import os, pathlib, signal, sys, time
from tfdist.launch import from_notebook

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background

here = pathlib.Path.cwd()

def note(name):
    (here / f".{name}").write_text(str(os.getpid()))
    (here / f".{name}").rename(here / name)

def hang(takes_time):
    from tfdist import cluster
    rank = cluster.detect().task.index
    def leave(*_):
        note(f"signalled-{rank}")
        print("leaving", flush=True)
        if not takes_time:
            sys.exit(75)
    signal.signal(signal.SIGTERM, leave)
    (here / f"launcher-of-{rank}").write_text(str(os.getppid()))
    note(f"worker-{rank}")
    while True:
        time.sleep(1000)

try:
    from_notebook(hang, sys.argv[1] == "True", grace_seconds=1000)
except KeyboardInterrupt:
    left = [name for rank in (0, 1) if os.path.exists("/proc/" + (here / (name := f"worker-{rank}")).read_text())]
    print("interrupted", left, flush=True)
"""


class Notebook:
    def __init__(self, here: pathlib.Path, *, takes_time: bool) -> None:
        self._here = here
        (here / "notebook.py").write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, "notebook.py", str(takes_time)],
            cwd=here,
            env=child_environment(TMPDIR=str(here)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, *names: str) -> list[int]:
        self.until(lambda: all((self._here / name).exists() for name in names), names)
        return [int((self._here / name).read_text()) for name in names]

    def until(self, condition, what) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > end:
                self.process.kill()
                pytest.fail(f"no sign of {what}: {self.process.communicate()}")
            time.sleep(0.01)


@pytest.fixture
def notebook(tmp_path):
    started = []

    def start(**options) -> Notebook:
        started.append(Notebook(tmp_path, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def is_gone(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_interrupt_gives_workers_time_and_then_raises(notebook):
    run = notebook(takes_time=False)
    run.wait_for("worker-0", "worker-1")
    os.killpg(run.process.pid, signal.SIGINT)  # like Jupyter and a terminal
    out, err = run.process.communicate(timeout=LIMIT_SECONDS)
    assert sorted(out.splitlines()) == ["[0] leaving", "[1] leaving", "interrupted []"], err
    assert out.splitlines()[-1] == "interrupted []"
    assert "SIGINT: ending the workers (SIGTERM, after 1000 s SIGKILL; at once if it comes again)" in err
    assert run.process.returncode == 0


def test_second_interrupt_kills_workers_at_once(notebook):
    run = notebook(takes_time=True)
    run.wait_for("worker-0", "worker-1")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("signalled-0", "signalled-1")
    time.sleep(1.05)  # the same signal within a second counts once
    run.process.send_signal(signal.SIGINT)
    out, err = run.process.communicate(timeout=LIMIT_SECONDS)
    assert out.splitlines()[-1] == "interrupted []", err


def test_nothing_outlives_the_notebooks_process(notebook):
    run = notebook(takes_time=True)
    pids = run.wait_for("worker-0", "worker-1", "launcher-of-0")
    run.process.kill()
    try:
        run.until(lambda: all(map(is_gone, pids)), "the end of the launcher and the workers")
    finally:
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
