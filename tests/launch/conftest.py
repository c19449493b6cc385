"""Runs `tfdist run` on small worker scripts and checks that no process is left."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest
from role_runs import roles_starter

from tfdist.utils.cores_and_ports import ReservedPorts

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 240
_FOREIGN = ("TF_CONFIG", "TF_NUM_", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TFDIST_", "SLURM_", "JOB_COMPLETION_INDEX")

# What every worker script may import: its rank and attempt, heartbeats, notes to the test, and waiting with a limit.
# Every process that imports it leaves its process id.
_WORKER_HELPER = """
import json, os, pathlib, signal, socket, subprocess, sys, time

HERE = pathlib.Path(__file__).parent
RANK = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
ATTEMPT = int(os.environ["TFDIST_ATTEMPT"])

def note(name, text=""):
    unfinished = HERE / f".{name}-of-{os.getpid()}"
    unfinished.write_text(str(text))
    unfinished.rename(HERE / name)

def wait_until(condition):
    end = time.monotonic() + 200
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.005)

def wait_for(name):
    wait_until((HERE / name).exists)

def pid_file(rank):
    return f"pid-{rank}-of-attempt-{ATTEMPT}" if ATTEMPT else f"pid-{rank}"

def wait_gone(rank):
    wait_ended(pid_file(rank))

def wait_ended(pid_file_name):
    wait_for(pid_file_name)
    wait_until(lambda: state_of(pid_file_name) in ("Z", ""))

def state_of(pid_file_name):
    "Returns the state of a process, such as 'T' for stopped, or '' if there is none."
    try:
        stat = pathlib.Path("/proc", (HERE / pid_file_name).read_text(), "stat").read_text()
    except OSError:  # reaped, perhaps between opening the file and reading it
        return ""
    return stat.rpartition(")")[2].split()[0]

def beat(**said):
    "Sends a heartbeat."
    with socket.socket(fileno=os.dup(int(os.environ["TFDIST_HEARTBEAT_FD"]))) as sender:
        sender.send(json.dumps({"alive": True, **said}).encode())

def beat_on(**said):
    "Sends heartbeats until the process ends."
    while not (HERE / "never").exists():
        beat(**said)
        time.sleep(0.05)

def say(*words):
    "Prints a complete line, or nothing if this process is killed."
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def print(*words, end="\\n", file=None, flush=False):
    "Writes all words at once: the launcher shows a line that pauses in the middle as two."
    (file or sys.stdout).write(" ".join(map(str, words)) + end)

def die(name="SIGKILL"):
    os.kill(os.getpid(), signal.Signals[name])

def hang():
    wait_for("never")

def grandchild(name, code="hang()", **options):
    "Starts a process that imports this module, and waits until it runs."
    code = f"import worker; from worker import *; note('pid-{name}', os.getpid()); {code}"
    subprocess.Popen([sys.executable, "-c", code], cwd=HERE, **options)
    wait_for(f"pid-{name}")

if __name__ != "__main__" and not (HERE / pid_file(RANK)).exists():
    note(pid_file(RANK), os.getpid())
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A finished run."""

    code: int
    out: list[str]
    err: list[str]

    def of(self, rank: int) -> list[str]:
        """The standard output of a worker."""
        return [line.removeprefix(f"[{rank}] ") for line in self.out if line.startswith(f"[{rank}] ")]

    @property
    def said(self) -> list[str]:
        """The messages of the launcher."""
        return [line.removeprefix("tfdist: ") for line in self.err if line.startswith("tfdist: ")]


class Run:
    """A running launcher."""

    def __init__(self, here: pathlib.Path, arguments: list[str], environ: dict[str, str], **options: object) -> None:
        self._here = here
        command = [sys.executable, "-m", "tfdist.launch", "run", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, cwd=here, env=environ, **{**pipes, **options})

    def wait_for(self, *names: str) -> list[str]:
        """Waits for notes of the workers and returns their texts."""
        for name in names:
            path = self._here / name
            self.until(path.exists, name)
        return [(self._here / name).read_text() for name in names]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > end or (self.process.poll() is not None and not condition()):
                code = self.process.poll()
                self.process.kill()
                _, err = self.process.communicate()
                pytest.fail(f"timed out waiting for {what}; launcher's exit code {code}, its output:\n{err.decode()}")
            time.sleep(0.005)

    def send_again(self, number: int) -> None:
        """Sends a signal that the launcher has received before; within a second both would count as one."""
        time.sleep(1.05)
        self.process.send_signal(number)

    def pids(self) -> dict[str, int]:
        return {path.name: int(path.read_text()) for path in self._here.glob("pid-*")}

    def end(self, limit_seconds: float = LIMIT_SECONDS) -> Ended:
        out, err = self.process.communicate(timeout=limit_seconds)
        lines = [(text or b"").decode(errors="surrogateescape").split("\n")[:-1] for text in (out, err)]
        return Ended(self.process.returncode, *lines)


def state_of(pid: int) -> str:
    """The letter of the process's state, Z for one that has ended, or an empty string for none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture
def state() -> Callable[[int], str]:
    return state_of


@pytest.fixture
def environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**kept, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def start(tmp_path: pathlib.Path, environ: dict[str, str]) -> Iterator[Callable[..., Run]]:
    """`start(script, *options, arguments=[], env={}, **popen)`; afterwards no process may be left."""
    runs: list[Run] = []
    (tmp_path / "worker.py").write_text(_WORKER_HELPER)

    def begin(script, *options, workers=2, arguments=(), env=None, **popen) -> Run:
        # Workers of an earlier run may be reading it.
        unfinished = tmp_path / ".script.py"
        unfinished.write_text("from worker import *\n" + textwrap.dedent(script))
        unfinished.rename(tmp_path / "script.py")
        command = ["--workers", str(workers), *options, "script.py", *arguments]
        runs.append(Run(tmp_path, command, {**environ, **(env or {})}, **popen))
        return runs[-1]

    yield begin
    left = {}
    for run in runs:
        if run.process.poll() is None:
            left["launcher"] = run.process.pid
            run.process.kill()
            run.process.communicate()
        end = time.monotonic() + 10
        # Killed by the kernel after the launcher's own end, or waiting for init to collect them.
        while any(state_of(pid) not in ("", "Z") for pid in run.pids().values()) and time.monotonic() < end:
            time.sleep(0.01)
        left |= {name: pid for name, pid in run.pids().items() if state_of(pid) not in ("", "Z")}
        for pid in left.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def run(start: Callable[..., Run]) -> Callable[..., Ended]:
    """`start`, to the end."""
    return lambda *arguments, **options: start(*arguments, **options).end()


@pytest.fixture
def node(start: Callable[..., Run]) -> Callable[..., Run]:
    """`node(rank, script, *options, …)`: starts the launcher of a host; see `start`."""
    with ReservedPorts(1) as reserved:
        (port,) = reserved.ports

    def begin(rank, script, *options, workers=1, nodes=2, env=None, **more) -> Run:
        where = ("--nodes", str(nodes), "--node-rank", str(rank), "--rendezvous", f"127.0.0.1:{port}")
        return start(
            script, *where, *options, workers=workers, env={"TFDIST_TOKEN": "0123456789abcdef", **(env or {})}, **more
        )

    begin.port = port  # type: ignore[attr-defined]
    return begin


@pytest.fixture
def both(node: Callable[..., Run]) -> Callable[..., list[Ended]]:
    """Runs two hosts to the end."""

    def run(script, *options, **more) -> list[Ended]:
        runs = [node(rank, script, *options, **more) for rank in (0, 1)]
        return [run.end() for run in runs]

    return run


@pytest.fixture
def begin(start: Callable[..., Run], tmp_path: pathlib.Path) -> Callable[..., Run]:
    """`begin(chief's script, *options, server=script)`: 2 workers and 1 parameter server."""
    return roles_starter(start, tmp_path, ROOT)


@pytest.fixture
def run_roles(begin: Callable[..., Run]) -> Callable[..., Ended]:
    """`begin`, to the end."""
    return lambda *arguments, **options: begin(*arguments, **options).end()
