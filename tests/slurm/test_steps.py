"""Steps of a real Slurm: which cluster each task finds, and what `tfdist run` says where it is started."""

import json
import re

import pytest

pytestmark = pytest.mark.long

_DETECT = """
import json, os
from tfdist import cluster
config = cluster.detect()
found = None if config is None else [list(config.cluster.jobs["worker"]), config.rank, config.source]
print(json.dumps([found, os.environ["SLURMD_NODENAME"], os.getuid()]))
"""
_HELLO = "import os, socket; print('hello from', socket.gethostname(), os.getuid())"


@pytest.fixture
def detect(slurm, directory):
    """Runs a command of Slurm with the program that detects the cluster; returns what each task has found, by rank."""
    (directory / "detect.py").write_text(_DETECT)

    def run(*command):
        ended = slurm.run(*command, directory=directory)
        assert ended.code == 0, ended.err
        found = [json.loads(line) for line in ended.out.splitlines() if line.startswith("[")]
        return sorted(found, key=lambda one: one[0][1] if one[0] else -1)

    return run


@pytest.mark.parametrize(
    "options",
    [
        "-N1 -n2",
        "-N2 -n2",
        "-N2 -n4",
        "-N2 -n5 -m cyclic",
        "-N2 -n5 -m block",
        "-N2 -n3 --ntasks-per-node=2",
        "-n2 : -n1",
        "-n1 : -n3 -m cyclic",
        "-n3 -w tf-n2 : -n2 -w tf-n1",  # Slurm sorts the nodes
    ],
)
def test_all_tasks_find_one_cluster(detect, options):
    program = ["python", "detect.py"]
    parts = [part.split() for part in options.split(" : ")]
    found = detect("srun", *parts[0], *program, *(word for part in parts[1:] for word in (":", *part, *program)))
    addresses = found[0][0][0]
    assert [one[0] for one in found] == [[addresses, rank, "Slurm"] for rank in range(len(found))]
    assert len(found) == len(addresses) == len(set(addresses)) >= 2
    assert [node for _, node, _ in found] == [address.partition(":")[0] for address in addresses]
    assert {uid for _, _, uid in found} == {5001}, "an ordinary user"


def test_neighbouring_steps_have_different_ports(slurm, directory):
    (directory / "detect.py").write_text(_DETECT)
    commands = "; ".join(["srun -n2 python detect.py"] * 3)
    ports = []
    for _ in range(2):
        ended = slurm.run("salloc", "-n2", "bash", "-c", commands, directory=directory)
        found = [json.loads(line)[0][0][0] for line in ended.out.splitlines()]
        ports += [address.rpartition(":")[2] for address in found[::2]]
    assert len(set(ports)) == 6, ports


@pytest.mark.parametrize("options", [("-N2", "-n4"), ("-N1", "-n2"), ("-N1", "-n3")])
def test_batch_script_that_was_submitted_within_a_step(slurm, directory, options):
    """It inherits the variables of that step, but no task of it is there."""
    (directory / "detect.py").write_text(_DETECT)
    (directory / "hello.py").write_text(_HELLO)
    (directory / "inner.sbatch").write_text(
        "#!/bin/bash\nenv | grep -c SLURM_STEP_ID\npython detect.py\n"
        "tfdist run --workers 1 hello.py\nsrun python detect.py\n"
    )
    inner = f"sbatch --wait --output inner.out {' '.join(options)} inner.sbatch"
    task = f"if [ $SLURM_PROCID = 0 ]; then {inner}; fi"
    ended = slurm.run("srun", "-N2", "-n4", "bash", "-c", task, directory=directory)
    assert ended.code == 0, ended
    lines = (directory / "inner.out").read_text().splitlines()
    assert lines[0] == "1", "SLURM_STEP_ID is inherited"
    found = [json.loads(line)[0] for line in lines if line.startswith("[[") or line.startswith("[null")]
    assert found[0] is None
    assert [one[2] for one in found[1:]] == ["Slurm"] * int(options[1][2:])
    assert any(line.startswith("[0] hello from tf-n") for line in lines), lines


def test_tfdist_run_in_an_interactive_step(slurm, directory):
    """It is refused with commands that work there."""
    (directory / "hello.py").write_text(_HELLO)
    (directory / "detect.py").write_text(_DETECT)
    task = (
        "if [ $SLURM_PROCID = 0 ]; then tfdist run --workers 2 hello.py; echo code $?; "
        "srun --overlap --ntasks=1 tfdist run --workers 2 hello.py; echo code $?; "
        "srun --overlap python detect.py; tfdist doctor --workers 2; echo code $?; fi"
    )
    ended = slurm.run("srun", "-n4", "bash", "-c", task, directory=directory)
    assert re.findall(r"^code (\d)", ended.out, re.MULTILINE) == ["2", "0", "2"], ended
    assert "srun --overlap --ntasks=1 tfdist run" in ended.err
    assert len(re.findall(r"^\[\d\] hello from tf-n1 5001", ended.out, re.MULTILINE)) == 2
    assert len([line for line in ended.out.splitlines() if line.startswith("[[")]) == 4
    assert "Received: --workers 2, and a Slurm step of several tasks." in ended.err
    assert "unset TF_CONFIG" not in ended.err


def test_tfdist_run_in_a_shell_of_salloc(slurm, directory):
    (directory / "hello.py").write_text(_HELLO)
    commands = "tfdist run --workers 1 hello.py; srun --ntasks=1 tfdist run --workers 1 hello.py"
    ended = slurm.run("salloc", "-n2", "bash", "-c", commands, directory=directory)
    assert ended.code == 0 and re.findall(r"hello from (\S+)", ended.out) == ["tf-login", "tf-n1"], ended
    warnings = [line for line in ended.err.splitlines() if "tfdist: warning: the workers run on " in line]
    assert len(warnings) == 1 and "tf-login, which Slurm has not allocated to job" in warnings[0]


def test_messages_of_two_nodes_are_shown_once_or_name_the_node(slurm, directory):
    (directory / "hello.py").write_text(_HELLO)
    task = (
        "export TFDIST_TOKEN=0123456789abcdef; tfdist run --nodes 2 --node-rank $SLURM_NODEID --rendezvous tf-n1:28500 "
        "--workers 1 hello.py"
    )
    ended = slurm.run("srun", "-N2", "-n2", "bash", "-c", task, directory=directory)
    assert sorted(ended.out.splitlines()) == ["[0] hello from tf-n1 5001", "[1] hello from tf-n2 5001"], ended
    said = [line for line in ended.err.splitlines() if line.startswith("tfdist: ")]
    of_all = [line for line in said if not re.match(r"tfdist: node [01]: ", line)]
    assert len(said) == len(set(said)), said
    assert "tfdist: attempt 0: 2 workers (node 0 (tf-n1): 1, node 1 (tf-n2): 1)" in of_all
    assert [node for node in "01" if any(line.startswith(f"tfdist: node {node}: 1 worker") for line in said)] == [
        "0",
        "1",
    ]


def test_names_that_do_not_resolve_end_the_tasks_soon(slurm, directory):
    """They never will, unlike those of pods: the limit of five minutes would only be lost."""
    slurm.name_hosts("tf-n1")
    (directory / "wait.py").write_text(
        "from tfdist import cluster\nconfig = cluster.detect()\nworkers = config.cluster.jobs['worker']\n"
        "peers = {'worker 1': workers[1]} if config.rank == 0 else {'worker 0': workers[0]}\n"
        "cluster.wait_for_peers(config.address, peers, 300, names_are_fixed=cluster.is_slurm_step())\n"
    )
    command = ("srun", "-N2", "-n2", "--kill-on-bad-exit=1", "python", "wait.py")
    ended = slurm.run(*command, directory=directory, limit_seconds=100)
    assert ended.code != 0
    assert "The names of nodes do not resolve on tf-n1. Received: worker 1 at tf-n2:" in ended.err, ended.err
