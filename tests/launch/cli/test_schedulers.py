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
LIMIT_SECONDS = 60


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
    command = re.search(r"^tfdist run (.*) --log-dir", text, re.MULTILINE)[1].split()
    assert options_of([*command, "train.py"]).grace < int(warning[1])


@pytest.fixture
def submit(tmp_path, environ):
    """Runs the batch script as Slurm's batch shell does, with this checkout's launcher and a `scontrol` that notes."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "tfdist").write_text(f'#!/bin/bash\nexec {sys.executable} -m tfdist.launch "$@"\n')
    (commands / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/scontrol\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    processes = []

    def begin(script):
        (tmp_path / "train.py").write_text(script)
        env = {**environ, "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        env |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}  # as in a batch shell
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


@pytest.mark.parametrize(("code", "name", "is_requeued"), [(75, "USR1", True), (1, "USR1", True), (75, "TERM", False)])
def test_slurm_job_that_is_signalled(submit, tmp_path, code, name, is_requeued):
    job = submit(SAVES.format(code=code))
    for _ in range(4):
        assert job.stdout.readline().endswith(b"up\n")
    job.send_signal(getattr(signal, f"SIG{name}"))
    assert job.wait(LIMIT_SECONDS) == {75: 75, 1: 128 + getattr(signal, f"SIG{name}")}[code]
    requeued = tmp_path / "scontrol"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 17\n" if is_requeued else "")
    assert sorted(path.name for path in (tmp_path / "logs-17").glob("*.log")) == [f"rank-{r}.log" for r in range(4)]


@pytest.mark.parametrize("code", [0, 3])
def test_slurm_job_that_ends_without_a_signal(submit, tmp_path, code):
    assert submit(f"raise SystemExit({code})").wait(LIMIT_SECONDS) == code
    assert not (tmp_path / "scontrol").exists()
