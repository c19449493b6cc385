"""The Slurm of these tests leaves nothing behind, however it ends."""

import os
import pathlib
import subprocess
import sys

import pytest
import slurm_cluster
from child_environment import SUPPORT

pytestmark = pytest.mark.long

_KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
import slurm_cluster
cluster = slurm_cluster.SlurmCluster({proctrack!r})
cluster.start("srun", "-N2", "sleep", "1000")
slurm_cluster.until(lambda: "sleep" in cluster.admin("squeue", "-h", "-o", "%j %T"), "the job")
print(cluster.run_directory, *cluster.host_pids().values(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def what_is_left(directory, pids):
    """Processes, mounts and cgroups of a cluster."""
    left = [f"process {pid}" for pid in pids if os.path.exists(f"/proc/{pid}")]
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command, mounts = (process / "cmdline").read_bytes(), (process / "mounts").read_text()
        except OSError:
            continue
        if str(directory).encode() in command or str(directory) in mounts:
            left.append(f"process {process.name}: {command!r}")
    return [*left, *map(str, pathlib.Path("/sys/fs/cgroup/freezer").glob(f"{directory.name}-*"))]


@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
def test_nothing_is_left(proctrack):
    if reason := slurm_cluster.why_not(proctrack):
        pytest.skip(reason)
    cluster = slurm_cluster.SlurmCluster(proctrack)
    cluster.start("srun", "-N2", "bash", "-c", "trap '' TERM INT; setsid sleep 1000 & sleep 1000")
    slurm_cluster.until(lambda: "RUNNING" in cluster.admin("squeue", "-h", "-o", "%T"), "the job")
    pids = cluster.host_pids().values()
    assert what_is_left(cluster.run_directory, pids)
    cluster.end()
    assert not what_is_left(cluster.run_directory, pids)
    assert not cluster.run_directory.exists()


@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
def test_no_process_is_left_if_the_tests_are_killed(proctrack):
    if reason := slurm_cluster.why_not(proctrack):
        pytest.skip(reason)
    path = [str(pathlib.Path(__file__).parent), str(SUPPORT)]
    program = _KILLED.format(path=path, proctrack=proctrack)
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9, killed.stderr
    directory, *pids = killed.stdout.split()
    root = pathlib.Path(directory)
    slurm_cluster.until(lambda: not [one for one in what_is_left(root, pids) if "process" in one], "the end", 30)
    slurm_cluster.remove_leftovers()
    assert not what_is_left(root, pids) and not root.exists()
