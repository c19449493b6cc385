"""Trainings on a real Slurm: interrupted again and again, and bit-identical to an undisturbed one; doctor and plan."""

import itertools
import pathlib

import numpy as np
import pytest
import slurm_cluster
from child_environment import ROOT

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.multi_process]

PROGRAM = pathlib.Path(__file__).parent / "resumed_program.py"
EPOCHS, STEPS_PER_EPOCH = 60, 4
INTERRUPTIONS = 10
LIMIT_SECONDS = 900


@pytest.fixture
def train(scripts):
    """`train(cluster, script)` submits the training in a directory of its own, where it resumes."""
    for script in scripts.glob("train*.sbatch"):
        text = script.read_text()
        workers = 2 if script.name == "train.sbatch" else 1
        script.write_text(text.replace("--workers 1 ", f"--workers {workers} "))

    def begin(cluster, script, name):
        directory = scripts / name
        if not directory.exists():
            cluster.make_directory(f"{scripts.name}/{name}")
        return cluster.submit(f"../{script}", str(PROGRAM), ".", str(EPOCHS), directory=directory)

    return begin


def steps_of(job):
    """The steps that were made in the current start of the job."""
    assert job.state not in ("COMPLETED", "FAILED"), job.output
    path = job.directory / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.split()[:2] == [job.name, str(job.restarts)]]


def finish(job):
    (job.directory / "fast").touch()
    slurm_cluster.until((job.directory / "result.npz").exists, f"the end of {job.name}: {job.output}", LIMIT_SECONDS)
    job.until_state("COMPLETED")
    with np.load(job.directory / "result.npz") as result:
        return dict(result)


def cancel(cluster, job, again):
    cluster.run("scancel", job.name)
    job.until_state("CANCELLED")
    return again()


def requeue(cluster, job, again):
    cluster.run("scontrol", "requeue", job.name, user="root")
    return job


def preempt(cluster, job, again):
    cluster.run("srun", "--partition=urgent", "--exclusive", "--nodes=2", "true")
    return job


@pytest.mark.parametrize(
    ("any_slurm", "script"), [("linuxproc", "train.sbatch"), ("cgroup", "train_nodes.sbatch")], indirect=["any_slurm"]
)
def test_every_interruption_is_saved_and_the_result_is_bit_identical(any_slurm, train, script):
    job = train(any_slurm, script, "interrupted")
    for how in itertools.islice(itertools.cycle([cancel, requeue, preempt]), INTERRUPTIONS):
        restarts = job.restarts
        slurm_cluster.until(
            lambda job=job: len(steps_of(job)) >= 2, f"steps of {job.name}: {job.output}", LIMIT_SECONDS
        )
        job = how(any_slurm, job, lambda: train(any_slurm, script, "interrupted"))
        if how is not cancel:
            slurm_cluster.until(lambda job=job, before=restarts: job.restarts > before, "the restart", LIMIT_SECONDS)
    result = finish(job)
    steps = [int(line.split()[2]) for line in (job.directory / "steps").read_text().splitlines()]
    # Nothing else saves: a step that is made twice would be one that an interruption has lost.
    assert steps == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    starts = {tuple(line.split()[:2]) for line in (job.directory / "steps").read_text().splitlines()}
    assert len(starts) == INTERRUPTIONS + 1

    undisturbed = any_slurm.make_directory(f"{job.directory.parent.name}/undisturbed")
    (undisturbed / "fast").touch()
    expected = finish(train(any_slurm, script, "undisturbed"))
    assert expected.keys() == result.keys()
    for name, value in expected.items():
        assert value.tobytes() == result[name].tobytes(), name


def test_doctor_checks_the_nodes_of_a_step(slurm, directory):
    """As docs/doctor.md says: in a job of more tasks --ntasks-per-node alone is ignored."""
    checks = 'srun --nodes "$SLURM_NNODES" --ntasks "$SLURM_NNODES" --ntasks-per-node 1 tfdist doctor --timeout 300'
    assert checks.removesuffix(" --timeout 300") in (ROOT / "docs" / "doctor.md").read_text()
    (directory / "doctor.sbatch").write_text(f"#!/bin/bash\n{checks}\n")
    job = slurm.submit("doctor.sbatch", directory=directory, options=("--nodes=2", "--ntasks=8"))
    slurm_cluster.until(lambda: job.state in ("COMPLETED", "FAILED"), f"the report: {job.output}", LIMIT_SECONDS)
    assert "2 workers, as Slurm says" in job.output, job.output
    assert "worker 0 - worker 1" in job.output and "0 errors" in job.output, job.output


def test_plan_of_two_nodes(slurm, directory):
    (directory / "train.py").write_text(
        "import keras, numpy as np\nfrom tfdist.strategies import MultiWorkerMirroredStrategy\n"
        "with MultiWorkerMirroredStrategy().scope():\n"
        "    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])\n    model.compile('sgd', 'mse')\n"
        "model.fit(np.ones((64, 8)), np.ones((64, 1)), batch_size=16, epochs=20, verbose=0)\n"
    )
    command = ("srun", "-N2", "-n2", "tfdist", "plan", "--no-xla", "--timeout", "400", "train.py")
    ended = slurm.run(*command, directory=directory, limit_seconds=600)
    assert ended.code == 0, ended.err
    assert "$ srun --ntasks=2 python train.py" in ended.out, ended.out
    assert "$ tfdist run --workers 2" not in ended.out
