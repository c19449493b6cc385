"""The examples for Slurm and Kubernetes, tested without either."""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.launch.cli.run_options import add_options

ROOT = pathlib.Path(__file__).resolve().parents[3]
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").iterdir())
JOB = ROOT / "examples" / "kubernetes" / "job.yaml"
LIMIT_SECONDS = 240


def options_of(arguments):
    parser = argparse.ArgumentParser(exit_on_error=True)
    add_options(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()], ids=["1.29", "newest"])
def test_kubernetes_schema(version):
    manifests = [part for path in MANIFESTS for part in yaml.safe_load_all(path.read_text())]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_kubernetes_job():
    job = yaml.safe_load(JOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy is allowed with nothing else"
    (container,) = pod["containers"]
    codes = {
        rule["action"]: rule["onExitCodes"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert {action: codes[action]["values"] for action in codes} == {"Ignore": [PREEMPTED_EXIT_CODE], "FailJob": [2]}
    assert {(rule["containerName"], rule["operator"]) for rule in codes.values()} == {(container["name"], "In")}
    assert container["command"][:2] == ["tfdist", "run"]
    options = options_of([*container["command"][2:], *container["args"]])
    assert options.script[0] == "train.py" and options.max_restarts > 0
    assert options.grace < pod["terminationGracePeriodSeconds"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in pod["volumes"]]
    assert container["volumeMounts"][0]["mountPath"] == container["args"][-1]


def test_slurm_options():
    text = SBATCH.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))
    assert options["nodes"] == options["ntasks"] == "1"
    assert "requeue" in options and options["open-mode"] == "append"
    warning = re.fullmatch(r"B:USR1@(\d+)", options["signal"])
    command = re.search(r"^ *tfdist run (.*) --log-dir", text, re.MULTILINE)[1].split()
    assert options_of([*command, "train.py"]).grace < int(warning[1])


def test_scripts_differ_only_in_what_they_start():
    one, several = ((SBATCH.parent / name).read_text() for name in ("train.sbatch", "train_nodes.sbatch"))
    mark = "# -------- The rest is the same"
    assert one[one.index(mark) :] == several[several.index(mark) :]


@pytest.fixture
def submit(tmp_path, environ):
    """Runs the batch script as Slurm's batch shell does, with this checkout's launcher and a `scontrol` that notes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "tfdist").write_text(f'#!/bin/bash\nexec {sys.executable} -m tfdist.launch "$@"\n')
    (commands / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/scontrol\n')
    (commands / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    (commands / "squeue").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/squeue\necho "${{STATE:-RUNNING}}"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    processes = []

    def begin(script, **variables):
        (tmp_path / "train.py").write_text(script)
        env = {**environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        env |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "8"}  # as in a batch shell
        env |= variables
        processes.append(
            subprocess.Popen(
                ["bash", SBATCH, "train.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


SAVES = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit({code}))
print("up", flush=True)
time.sleep(100)
"""


ARRAY = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("code", "name", "variables", "requeued"),
    [
        (75, "USR1", {}, "17"),
        (1, "USR1", ARRAY, "17_3"),  # the last task, whose SLURM_JOB_ID is the id of the array
        (75, "TERM", {"STATE": "COMPLETING"}, ""),  # scancel
        (75, "TERM", {}, "17"),  # a preemption with a grace time
    ],
)
def test_slurm_job_that_is_signalled(submit, tmp_path, code, name, variables, requeued):
    job = submit(SAVES.format(code=code), **variables)
    for _ in range(4):
        assert job.stdout.readline().endswith(b"up\n")
    job.send_signal(getattr(signal, f"SIG{name}"))
    assert job.wait(LIMIT_SECONDS) == {75: 75, 1: 128 + signal.SIGUSR1}[code]
    noted = tmp_path / "scontrol"
    assert (noted.read_text() if noted.exists() else "") == (f"requeue {requeued}\n" if requeued else "")
    assert f"--jobs {requeued or 17} " in (tmp_path / "squeue").read_text()
    assert sorted(path.name for path in (tmp_path / "logs-17").glob("*.log")) == [f"rank-{r}.log" for r in range(4)]


def test_slurm_job_that_never_saves_is_not_requeued_for_ever(submit, tmp_path):
    """As with --time=1: the signal arrives before the training has begun."""
    noted, checkpoints = tmp_path / "scontrol", tmp_path / "checkpoints"
    progress = "import os, pathlib; pathlib.Path('checkpoints').mkdir(exist_ok=True); {}; os._exit(137)"
    for number, script in enumerate(["", "", "", "pathlib.Path('checkpoints/new').touch()", "", "", "", ""]):
        _, said = submit(progress.format(script or "0")).communicate(timeout=LIMIT_SECONDS)
        is_requeued = number < 7
        assert len(noted.read_text().splitlines()) == min(number + 1, 7), said
        assert (b"Not requeued: 4 times in a row without a checkpoint in checkpoints." in said) is not is_requeued
    assert checkpoints.exists()


@pytest.mark.parametrize("code", [0, 3])
def test_slurm_job_that_ends_without_a_signal(submit, tmp_path, code):
    assert submit(f"raise SystemExit({code})").wait(LIMIT_SECONDS) == code
    assert not (tmp_path / "scontrol").exists()
