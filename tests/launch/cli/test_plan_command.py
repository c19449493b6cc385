"""`tfdist plan`: its options, what it prints and writes, and its errors; programs are not measured here."""

import argparse
import dataclasses
import json

import pytest
from planned_programs import program

from tfdist.launch.cli import plan_command, plan_execution
from tfdist.launch.cli.main import add_command, main
from tfdist.launch.cli.plan_command import memory_bytes
from tfdist.launch.cli.plan_execution import METHODS
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import DENSE
from tfdist.planning.plans import PlanFile
from tfdist.planning.topology import parse_link
from tfdist.probe.run_probe import ProbeError
from tfdist.utils.argument_checks import UsageError


@pytest.fixture
def script(tmp_path, monkeypatch):
    for name in ("TF_CONFIG", "SLURM_JOB_ID", "SLURM_PROCID", "TFDIST_NUM_WORKERS", "TFDIST_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plan_execution, "usable_cores", lambda: 2)
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError('the script was run')")
    return str(path)


class Probe:
    """Takes the place of the measurement."""

    def __init__(self, result=None):
        self.result, self.calls = result or program(), []

    def __call__(self, script, **options):
        self.calls.append((list(script), options))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def plan(*arguments, probe=None):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "plan")
    options = parser.parse_args(["plan", *arguments])
    return plan_command.execute(options, probe or Probe())


def test_plans_for_each_number_of_workers(script, capsys, tmp_path):
    probe, file = Probe(), tmp_path / "plan.json"
    arguments = ("--workers", "2,8", "--link", "1gbit,0.1ms", "--json", str(file))
    assert plan(*arguments, script, "--epochs", "3", probe=probe) == 0
    printed = capsys.readouterr().out
    assert f"$ tfdist run --chief --workers 8 {script} --epochs 3" in printed
    assert "2 workers, each with 941.5 Mbit/s and 100 µs" in printed and "8 workers, each with" in printed
    assert f"$ tfdist run --chief --workers 8 {script}" in printed
    assert max(map(len, printed.replace(script, "train.py").splitlines())) <= 120
    measured = {"workers": (2, 8), "methods": (), "with_xla": True, "timeout_seconds": 60.0, "cores_per_worker": 2}
    assert probe.calls == [([script, "--epochs", "3"], measured)]
    found = PlanFile.read(file)
    assert {one.workers for one in found.plans} == {2, 8}
    assert found.link == {"bytes_per_second": parse_link("1gbit").bytes_per_second, "latency_seconds": 1e-4}
    keys = "strategy compression exact step_seconds samples_per_second memory_bytes wire_bytes reason code"
    assert set(keys.split()) <= set(json.loads(file.read_text())["plans"][0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "train.py"]


def test_permissions_reach_the_measurement_and_the_search(script, capsys):
    probe = Probe()
    allowed = ("--allow-compression", "--allow-local-updates", "--no-xla")
    assert plan("--workers", "2", "--link", "10mbit", *allowed, script, probe=probe) == 0
    assert probe.calls[0][1]["methods"] == METHODS and not probe.calls[0][1]["with_xla"]
    printed = capsys.readouterr().out
    assert 'compression="powersgd:4"' in printed and "DiLoCo(" in printed


def test_earlier_measurements_are_used_again(script, capsys, tmp_path):
    file = tmp_path / "plan.json"
    assert plan("--workers", "2", "--link", "1gbit", "--json", str(file), script) == 0
    probe = Probe()
    assert plan("--probe", str(file), "--workers", "4", "--link", "10gbit", probe=probe) == 0
    assert not probe.calls and "4 workers, each with 9.4 Gbit/s" in capsys.readouterr().out


def test_without_a_link_the_workers_are_here(script, capsys):
    probe = Probe()
    assert plan(script, probe=probe) == 0
    assert probe.calls[0][1]["workers"] == (1, 2) and probe.calls[0][1]["cores_per_worker"] == 1
    printed = capsys.readouterr().out
    assert printed.startswith("1 worker; 64 samples in a step") and "$ python " in printed
    plan("--workers", "8", script, probe=probe)  # which share two cores
    assert probe.calls[1][1]["cores_per_worker"] == 1
    assert capsys.readouterr().out.startswith("8 workers on this machine; 64 samples in a step")


def test_workers_on_this_machine_share_its_memory(script, capsys):
    plan("--workers", "2", "--memory", "650MB", script)
    assert "Do not fit into 650.0 MB of a worker" in capsys.readouterr().out
    measured = program()
    machine = dataclasses.replace(measured.machine, memory_bytes=1_300_000_000)
    measured = dataclasses.replace(measured, machine=machine)
    plan("--workers", "2", script, probe=Probe(measured))
    assert "Do not fit into 650.0 MB of a worker" in capsys.readouterr().out
    plan("--workers", "2", "--link", "1gbit", script, probe=Probe(measured))
    assert "Do not fit" not in capsys.readouterr().out


def test_in_a_cluster_links_are_measured(script, monkeypatch, capsys):
    config = {"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setattr(plan_execution, "measured_link", lambda *_: LinkSpeed(5e6, 0.002))
    assert plan(script) == 0
    assert "3 workers, each with 40.0 Mbit/s and 2.00 ms" in capsys.readouterr().out
    monkeypatch.setattr(plan_execution, "measured_link", lambda *_: None)
    probe = Probe()
    assert plan(script, probe=probe) == 0  # another task plans
    assert not probe.calls and "the first task of the cluster shows the plans" in capsys.readouterr().err


def test_nothing_fits(script, capsys):
    assert plan("--workers", "2", "--link", "1gbit", "--memory", "100MB", script) == 1
    error = capsys.readouterr().err
    assert error.startswith("tfdist plan: No plan fits into the memory of a worker. Received: 100.0 MB; ")
    assert " comes nearest and needs " in error


def test_a_program_that_cannot_be_measured(script, capsys):
    assert plan("--link", "1gbit", script, probe=Probe(ProbeError("The program never calls `fit`."))) == 1
    assert capsys.readouterr().err == "tfdist plan: The program never calls `fit`.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "0gbit", "train.py"], "Invalid rate of a link. Received: '0gbit'."),
        (["--link", "1gbit,-1ms", "train.py"], "Invalid duration. Received: '-1ms'."),
        (["--link", "1", "train.py"], "Invalid rate of a link. Received: '1'."),
        (["--link", "1gbit,1ms,2ms", "train.py"], "Invalid link. Received: '1gbit,1ms,2ms'."),
        (["--workers", "0", "train.py"], "Invalid numbers of workers. Received: '0'."),
        (["--workers", "8..2", "train.py"], "Invalid numbers of workers. Received: '8..2'."),
        (["--memory", "16", "train.py"], "Invalid size of a memory. Received: '16'."),
        (["--memory", "0GB", "train.py"], "Invalid size of a memory. Received: '0GB'."),
        (["--speeds", "1,0", "train.py"], "Invalid speeds of workers. Received: '1,0'."),
        (["--devices", "0", "train.py"], "Invalid number. Received: '0'."),
        ([], "Either a program is measured, or earlier measurements are used. Received: no script and no --probe."),
        (["--probe", "plan.json", "train.py"], "Either a program is measured, or earlier measurements are used."),
        (["--probe", "missing.json"], "The plan cannot be read. Received: missing.json"),
        (["--probe", "plan.json", "--cores-per-worker", "1"], "The cores of a worker are those of the measurements."),
        (["missing.py"], "The script is not a file. Received: 'missing.py'."),
        (["--json", "missing/plan.json", "train.py"], "The plan cannot be written there."),
    ],
)
def test_invalid_commands(script, arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_without_measurements_is_no_plan(tmp_path, capsys, script):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"format": 1, "plans": [], "too_large": [], "measurements": {}, "link": {}}))
    assert main(["plan", "--probe", str(file), "--link", "1gbit"]) == 2
    assert "The plan has no measurements that this version can use." in capsys.readouterr().err


def test_speeds_of_the_workers(script, capsys):
    probe = Probe(program(fixed_seconds=0.005, row_seconds=0.002))
    assert plan("--speeds", "1,0.5", "--link", "100gbit", script, probe=probe) == 0
    assert probe.calls[0][1]["workers"] == (2,) and "load_balancing=True" in capsys.readouterr().out
    with pytest.raises(UsageError, match="The speeds are those of another number of workers"):
        plan("--speeds", "1,0.5", "--workers", "4", "--link", "1gbit", script)


def test_more_workers_than_samples(script, capsys):
    assert plan("--workers", "2,128", "--link", "1gbit", script) == 0
    printed = capsys.readouterr()
    assert "128 workers: left out, as batches have 64 samples." in printed.err and "128 workers" not in printed.out
    assert plan("--workers", "128", "--link", "1gbit", script) == 1


def test_measurements_without_compression(script, capsys):
    measured = program()
    exchanges = tuple(one for one in measured.program.exchanges if one.method == DENSE)
    measured = dataclasses.replace(measured, program=dataclasses.replace(measured.program, exchanges=exchanges))
    assert plan("--link", "1gbit", "--allow-compression", script, probe=Probe(measured)) == 0
    assert "the measurements have no compression methods" in capsys.readouterr().err


def test_units():
    assert memory_bytes("1.5GB") == 1_500_000_000 and memory_bytes("512MiB") == 512 * 2**20
    assert parse_link("300mbit, 0.5ms").latency_seconds == 0.0005 and parse_link("1gbit,").latency_seconds == 0.0


def test_missing_measurements_of_xla_are_named(script, capsys):
    measured = program()
    steps = tuple(step for step in measured.program.steps if not step.compiled)
    probe = Probe(dataclasses.replace(measured, program=dataclasses.replace(measured.program, steps=steps)))
    plan(script, probe=probe)
    assert "Steps that XLA compiles are not planned" in capsys.readouterr().err
    plan("--no-xla", script, probe=probe)
    assert "XLA" not in capsys.readouterr().err
    plan(script)
    assert "XLA" not in capsys.readouterr().err
