"""The Slurm example for several nodes, with an `srun` that starts both supervisors on this host."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
SBATCH = ROOT / "examples" / "slurm" / "train_nodes.sbatch"
LIMIT_SECONDS = 240

# Like srun, starts the command once per node, forwards signals, and exits with the highest exit code.
_SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
place = next(i for i, argument in enumerate(sys.argv) if i and not argument.startswith("--"))
step = dict(os.environ, SLURM_NNODES="2", SLURM_NTASKS="2", SLURM_STEP_ID="0")
ids = [dict(SLURM_NODEID=str(i), SLURM_PROCID=str(i)) for i in (0, 1)]
nodes = [subprocess.Popen(sys.argv[place:], env=dict(step, **one)) for one in ids]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: [node.send_signal(number) for node in nodes])
sys.exit(max(node.wait() for node in nodes))
"""


@pytest.fixture
def submit(tmp_path, environ):
    """Runs the batch script as Slurm's batch shell does."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "tfdist").write_text(f'#!/bin/bash\nexec {sys.executable} -m tfdist.launch "$@"\n')
    shows = "echo localhost; echo localhost"
    notes = f"echo $@ >> {tmp_path}/scontrol"
    (commands / "scontrol").write_text(f'#!/bin/bash\nif [ "$1" = show ]; then {shows}; else {notes}; fi\n')
    (commands / "srun").write_text(_SRUN)
    (commands / "squeue").write_text('#!/bin/bash\necho "$STATE"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    number = next(number for number in range(os.getpid() % 2000, 4000) if is_free(28_400 + number))
    processes = []

    def begin(script, state="RUNNING"):
        (tmp_path / "train.py").write_text(script)
        path = f"{commands}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**environ, "PATH": path, "SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "localhost"}
        env |= {"SLURM_CPUS_PER_TASK": "8", "STATE": state}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(["bash", SBATCH, "train.py"], cwd=tmp_path, env=env, **pipes))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def is_free(port):
    with socket.socket() as holder:
        return holder.connect_ex(("127.0.0.1", port)) != 0


SAVES = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
print("up", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("name", "state"), [("USR1", "RUNNING"), pytest.param("TERM", "COMPLETING", marks=pytest.mark.long)]
)
def test_job_that_receives_a_signal(submit, tmp_path, name, state):
    job = submit(SAVES, state)
    for _ in range(8):
        assert job.stdout.readline().endswith(b"up\n"), job.stderr.read()
    job.send_signal(getattr(signal, f"SIG{name}"))
    assert job.wait(LIMIT_SECONDS) == 75
    assert (tmp_path / "scontrol").exists() is (state == "RUNNING")


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.long), 3])
def test_job_that_ends_by_itself(submit, tmp_path, code):
    job = submit(f"raise SystemExit({code})")
    job.communicate(timeout=LIMIT_SECONDS)
    assert job.returncode == code
    assert not (tmp_path / "scontrol").exists()
    (logs,) = tmp_path.glob("logs-*")
    assert sorted(path.name for path in logs.glob("*.log")) == [f"rank-{rank}.log" for rank in range(8)]


def test_options():
    text = SBATCH.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    assert int(options["nodes"]) > 1 and options["ntasks-per-node"] == "1" and "requeue" in options
    assert "--rejoin-timeout 0" in text, "nobody starts a lost supervisor again"
    (grace,) = re.findall(r"--grace (\d+)", text)
    assert int(grace) < int(re.fullmatch(r"B:USR1@(\d+)", options["signal"])[1])
