"""The batch scripts of the examples on a real Slurm: what cancels, requeues, preempts and breaks a job."""

import re

import pytest

pytestmark = pytest.mark.long

# Saves for a second, during which a second signal of the launcher would be SIGKILL. Ends by itself when it was started
# often enough.
_PROGRAM = """
import json, os, pathlib, signal, sys, time
rank = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
started = int(os.environ.get("SLURM_RESTART_COUNT", 0))
element = os.environ.get("SLURM_ARRAY_TASK_ID", "")

def note(name):
    pathlib.Path(f"{name}{element}-{started}-{rank}").touch()

def save(*_):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1)
    note("saved")
    os._exit(75)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, save)
note("up")
if started >= int(sys.argv[1]):
    sys.exit()
time.sleep(1000)
"""
SCRIPTS = {"train.sbatch": 1, "train_nodes.sbatch": 2}
each_script = pytest.mark.parametrize("script", SCRIPTS)


@pytest.fixture
def submit(scripts, request):
    """`submit(script, starts, *options)` submits a job that ends by itself in its start number `starts`, from 0."""
    cluster = next(request.getfixturevalue(kind) for kind in ("slurm", "any_slurm") if kind in request.fixturenames)
    (scripts / "train.py").write_text(_PROGRAM)

    def begin(script, starts, *options):
        return cluster.submit(script, "train.py", str(starts), directory=scripts, options=options)

    return begin


def files(name, script, start=0):
    return [f"{name}-{start}-{rank}" for rank in range(SCRIPTS[script])]


def cancel(slurm, job):
    slurm.run("scancel", job.name)


def cancel_everything(slurm, job):
    slurm.run("scancel", "--full", job.name)


def requeue(slurm, job):
    slurm.run("scontrol", "requeue", job.name, user="root")


def announce_end(slurm, job):
    slurm.run("scancel", "--batch", "--signal=USR1", job.name)


def preempt(slurm, job):
    """With the grace time of the partition: Slurm signals the steps, not the batch shell."""
    slurm.run("srun", "--partition=urgent", "--exclusive", "--nodes=2", "true")


@each_script
@pytest.mark.parametrize("how", [cancel, cancel_everything, requeue, announce_end, preempt])
def test_all_workers_save(any_slurm, submit, script, how):
    """And all but a cancelled job are started again, to their end."""
    job = submit(script, 1)
    job.until_files(*files("up", script))
    how(any_slurm, job)
    job.until_files(*files("saved", script))
    if how in (cancel, cancel_everything):
        job.until_state("CANCELLED")
        assert job.restarts == 0
    else:
        job.until_state("COMPLETED")
        job.until_files(*files("up", script, 1))
        assert job.restarts == 1
    assert "preempted: all workers saved and exited (exit code 75)" in job.output


@each_script
def test_time_limit(slurm, submit, script):
    job = submit(script, 1, "--time=1", "--signal=B:USR1@45")  # Slurm may send it later, as it looks once a while
    job.until_files(*files("up", script), *files("saved", script))
    job.until_state("COMPLETED")
    assert job.restarts == 1 and "SIGUSR1" in job.output


def test_job_that_is_too_short_is_not_requeued_for_ever(slurm, submit):
    """SIGUSR1 arrives at the start, and nothing is saved."""
    job = submit("train.sbatch", 99, "--time=1")
    (job.directory / "train.py").write_text("import time; time.sleep(1000)")
    job.until(lambda: "Not requeued: 4 times in a row without a checkpoint in checkpoints." in job.output, "the end")
    job.until_state("FAILED", "TIMEOUT")
    assert job.restarts == 3


def test_signal_without_batch_is_lost(slurm, submit):
    """Slurm's rule, which the documentation names: scancel --signal signals steps; the shell only with --batch."""
    job = submit("train.sbatch", 0)
    job.until_state("COMPLETED")
    (job.directory / "idle.sbatch").write_text(
        "#!/bin/bash\ntrap 'touch signalled' USR1\ntouch up-0-0\nsleep 2; true\n"
    )
    idle = slurm.submit("idle.sbatch", directory=job.directory)
    idle.until_state("RUNNING")
    slurm.run("scancel", "--signal=USR1", idle.name)
    idle.until_state("COMPLETED")
    assert not (job.directory / "signalled").exists()


@pytest.mark.parametrize("task", [1, 2])
def test_array_requeues_one_task(slurm, submit, task):
    """SLURM_JOB_ID of the last task is the id of the array."""
    array = submit("train.sbatch", 1, "--array=1-2")
    one, other = (type(array)(slurm, f"{array.name}_{number}", array.directory) for number in (task, 3 - task))
    one.until_files("up1-0-0", "up2-0-0")
    slurm.run("scancel", "--batch", "--signal=USR1", one.name)
    one.until_files(f"saved{task}-0-0", f"up{task}-1-0")
    one.until_state("COMPLETED")
    assert (one.restarts, other.restarts, other.state) == (1, 0, "RUNNING")
    assert not (array.directory / f"saved{3 - task}-0-0").exists()


@pytest.mark.parametrize("node", [0, 1])
def test_lost_supervisor(any_slurm, submit, node):
    """Nobody starts it again: the job does so, at once."""
    job = submit("train_nodes.sbatch", 1)
    job.until_files(*files("up", "train_nodes.sbatch"))
    name = f"bin/tfdist run --nodes 2 --node-rank {node}"
    killed = any_slurm.run("pkill", "--oldest", "-KILL", "-f", name, host=f"tf-n{node + 1}", user="root")
    assert killed.code == 0
    job.until_state("COMPLETED")
    assert job.restarts == 1
    assert sorted(path.name for path in job.directory.glob("up-1-*")) == files("up", "train_nodes.sbatch", 1)
    said = "not started: node 1 did not join again within 0 s" if node else "the rendezvous was lost"
    assert said in job.output


# Not the cable of the first node: Slurm holds the job if that node returns with the old batch script still on it.
@pytest.mark.parametrize(("fault", "node"), [("unplug", "tf-n2"), ("crash", "tf-n1"), ("crash", "tf-n2")])
def test_lost_node(slurm, submit, fault, node):
    """Slurm requeues the job, which waits until there are two nodes again."""
    job = submit("train_nodes.sbatch", 1)
    job.until_files(*files("up", "train_nodes.sbatch"))
    getattr(slurm, fault)(node)
    job.until(lambda: job.restarts == 1, "the job to be requeued")
    getattr(slurm, "plug" if fault == "unplug" else "boot")(node)
    job.until_state("COMPLETED")
    job.until_files(*files("up", "train_nodes.sbatch", 1))


def test_supervisors_have_the_cpus_of_the_job(any_slurm, submit):
    """Since 22.05 srun does not inherit --cpus-per-task."""
    job = submit("train_nodes.sbatch", 0)
    (job.directory / "train.py").write_text("import os; print('task', os.environ['SLURM_CPUS_PER_TASK'])")
    job.until_state("COMPLETED")
    assert re.findall(r"\[\d\] task (\d)", job.output) == ["2", "2"]


def test_heterogeneous_job(slurm, submit):
    """The components are nodes of one run."""
    job = submit("train_nodes.sbatch", 0)
    job.until_state("COMPLETED")
    (job.directory / "parts.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=1 --ntasks=1\n#SBATCH hetjob\n#SBATCH --nodes=1 --ntasks=2\n"
        "srun --het-group=0,1 python -c 'from tfdist import cluster; c = cluster.detect(); print(c.rank, c.address)'\n"
    )
    parts = slurm.submit("parts.sbatch", directory=job.directory)
    parts.until_state("COMPLETED")
    found = sorted(line.split() for line in parts.output.splitlines())
    assert [rank for rank, _ in found] == ["0", "1", "2"]
    assert [address.partition(":")[0] for _, address in found] == ["tf-n1", "tf-n2", "tf-n2"]
