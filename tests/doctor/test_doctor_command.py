"""`tfdist doctor` as it is typed: exit codes, lines, JSON."""

import contextlib
import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest
from child_environment import run_python

import tfdist
from tfdist.cluster import ClusterConfig, ClusterSpec, Task, why_unreachable
from tfdist.doctor import check_runner
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.compression_advice import advise
from tfdist.doctor.link_measurement import LinkMeasurement
from tfdist.doctor.local_cluster import local_cluster
from tfdist.doctor.report import Finding, Report, to_text
from tfdist.launch.cli.main import main
from tfdist.launch.processes.orphan_reaper import child_pids
from tfdist.utils.cores_and_ports import ReservedPorts

CLUSTER = '{"cluster": {"worker": ["127.0.0.1:%d", "127.0.0.1:%d"]}, "task": {"type": "worker", "index": 0}}'
KEYS = "format tfdist verdict errors warnings cluster findings links compression".split()


@pytest.fixture(autouse=True)
def nothing_described(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TF_CONFIG", "TFDIST_", "SLURM_", "JOB_COMPLETION")) or "proxy" in name.lower():
            monkeypatch.delenv(name)


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Runs the command with the checks that it is given in the place of the machine's."""
    run_checks = check_runner.run_checks

    def run(*arguments, checks=()):
        monkeypatch.setattr(check_runner, "run_checks", functools.partial(run_checks, checks=checks))
        code = main(["doctor", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def found(level):
    return [lambda context: [Finding(level, "x", "y", "z", "w")]]


def free_ports():
    with ReservedPorts(2) as reserved:
        return reserved.ports


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("warning", 0), ("error", 1)])
def test_exit_code(doctor, level, code):
    ended, output, _ = doctor(checks=found(level))
    assert ended == code
    assert f"  {level if level == 'ok' else level.upper():<9}x" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "--workers: Invalid number. Received: '0'"),
        (["--parameters", "10Q"], "--parameters: Invalid number. Received: '10Q'. Expected: a number"),
        (["--parameters", "0"], "Received: '0'"),
        (["--keep", "x"], "--keep: Invalid number"),
        (["--timeout", "nan"], "--timeout: Invalid number"),
        (["--timeout", "inf"], "--timeout: Invalid number"),
        (["--time", "1"], "unrecognized arguments: --time"),
    ],
)
def test_wrong_command(doctor, arguments, message):
    code, output, errors = doctor(*arguments)
    assert (code, output) == (2, "") and message in errors


def test_workers_of_a_cluster_that_is_described(doctor, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", CLUSTER % (1, 2))
    code, _, errors = doctor("--workers", "2")
    assert code == 2 and "A cluster is described already. Received: --workers 2" in errors


def test_workers_in_a_slurm_step(doctor, monkeypatch):
    """The advice names what describes the cluster; TF_CONFIG is not set."""
    step = {"PROCID": "0", "NTASKS": "2", "STEP_ID": "0", "JOB_ID": "7", "STEP_NODELIST": "n1"}
    for name, value in {**step, "STEP_TASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    code, _, errors = doctor("--workers", "2")
    assert code == 2 and "--workers 2, and a Slurm step of several tasks." in errors
    assert "srun --ntasks=1 --overlap" in errors and "TF_CONFIG" not in errors


def test_a_wrong_description_is_a_finding(doctor, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": ')
    code, output, _ = doctor("--json", checks=found("ok"))
    document = json.loads(output)
    assert code == 1 and document["cluster"] is None
    cluster = document["findings"][0]
    assert (cluster["check"], cluster["level"]) == ("cluster", "error")
    assert "TF_CONFIG is wrong. It is not JSON" in cluster["found"] and "unset it" in cluster["remedy"]


def test_nobody_else(doctor, monkeypatch):
    ports = free_ports()
    monkeypatch.setenv("TF_CONFIG", CLUSTER % ports)
    code, output, _ = doctor("--timeout", "0", "--json")
    document = json.loads(output)
    assert code == 1 and list(document) == KEYS
    assert document["cluster"]["addresses"] == {f"worker {i}": f"127.0.0.1:{port}" for i, port in enumerate(ports)}
    assert [x["level"] for x in document["findings"] if x["check"] == "peers"] == ["error"]


def test_an_evaluator_looks_at_its_machine(doctor, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", (CLUSTER % (1, 2)).replace('"worker", "index"', '"evaluator", "index"'))
    code, output, _ = doctor(checks=found("ok"))
    assert code == 0 and "no cluster with an address for evaluator 0" in output and "\nevaluator 0\n" in output


@pytest.mark.multi_process
def test_two_workers_of_this_machine(tmp_path):
    """The one start of TensorFlow: the machine that runs the tests is well, or none of them would run."""
    command = ["-m", "tfdist.launch", "doctor", "--workers", "2", "--json", "--checkpoints", "new"]
    document = json.loads(run_python(*command, cwd=tmp_path).stdout)
    assert list(document) == KEYS
    assert (document["format"], document["tfdist"], document["errors"]) == (1, tfdist.__version__, 0)
    levels = {(x["task"], x["check"]): x["level"] for x in document["findings"]}
    for check in "own port, tensorflow, keras, tensorflow start, devices, keras backend, private symbols".split(", "):
        assert levels["worker 0", check] == "ok"
    assert levels["worker 1", "own port"] == levels["", "peers"] == levels["", "same versions"] == "ok"
    [link] = document["links"]
    assert (link["first"], link["second"]) == ("worker 0", "worker 1") and link["bytes_per_second"] > 1e8
    assert document["compression"]["suggestion"] is None  # memory is faster than any network
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multi_process
def test_under_the_launcher(tmp_path):
    """Two tasks that start together, and one report; the exit code is the run's."""
    script = tmp_path / "look.py"
    script.write_text(
        "import sys\nfrom tfdist.doctor import check_runner\nfrom tfdist.launch.cli.main import main\n"
        "check_runner.run_checks.__kwdefaults__['checks'] = ()\nsys.exit(main(['doctor', *sys.argv[1:]]))\n"
    )
    launcher = ["-m", "tfdist.launch", "run", "--workers", "2"]
    ended = run_python(*launcher, script, "--parameters", "1M", cwd=tmp_path)
    assert "[0]   ok       peers               all 2 tasks answer each other" in ended.stdout
    assert "[1] tfdist doctor: worker 1: worker 0 has the report: 0 errors, 0 warnings" in ended.stderr
    assert "[1]" not in ended.stdout


def test_local_peers_end_with_the_checks():
    ports = free_ports()
    with pytest.raises(KeyboardInterrupt), local_cluster(ports, dict(os.environ), 100.0) as config:
        assert config.rank == 0
        raise KeyboardInterrupt
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            assert f"127.0.0.1:{ports[1]}".encode() not in path.read_bytes()


def test_ctrl_c_is_handled_by_the_first_worker_alone(capfd):
    """The terminal sends it to all of them: the others must not print tracebacks, and are ended by the first."""
    ports = free_ports()
    before = set(child_pids())
    with pytest.raises(KeyboardInterrupt), local_cluster(ports, dict(os.environ), 100.0):
        (peer,) = set(child_pids()) - before
        end = time.monotonic() + 30
        while why_unreachable(f"127.0.0.1:{ports[1]}", 1.0) is not None and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(peer, signal.SIGINT)
        time.sleep(0.3)
        assert why_unreachable(f"127.0.0.1:{ports[1]}", 1.0) is None
        raise KeyboardInterrupt
    assert capfd.readouterr().err == ""


def report():
    config = ClusterConfig(ClusterSpec({"worker": ["a:1", "b:1", "c:1"]}), Task("worker", 0), source="TF_CONFIG")
    links = tuple(LinkMeasurement("worker 0", f"worker {i}", 0.0002 * i, -0.5, 0.0001, 1.2e7, None) for i in (1, 2))
    sent = tuple(LinkMeasurement(link.first, link.second, 0.0002, 0.0, 0.0001, 1.2e7, 1.1e7) for link in links)
    findings = (
        Finding("ok", "python", "3.11.7", task="worker 0"),
        Finding("ok", "python", "3.11.7", task="worker 1"),
        *(Finding("warning", "cores", "2 usable", "3", "Start fewer. " * 12, task=f"worker {i}") for i in (1, 2)),
        Finding("error", "same versions", "keras 1; keras 2", "one version", "Install the same."),
    )
    return Report(
        CheckContext({}, 2, config), findings, {"worker 0": "host0", "worker 1": "host1"}, links, advise(10**7, 3, sent)
    )


def test_lines():
    text = to_text(report())
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()
    assert lines[:4] == [
        f"tfdist doctor {tfdist.__version__}",
        "",
        "worker 0 at a:1 on host0",
        "  ok       python              3.11.7",
    ]
    assert "worker 1 at b:1 on host1: 1 of 2 findings ok" in lines
    assert "worker 2 at c:1: 0 of 1 findings ok" in lines
    assert lines.count("  WARNING  cores               worker 1, worker 2: 2 usable") == 1
    assert lines.count("                               expected: 3") == 1
    assert "  ERROR    same versions       keras 1; keras 2" in lines
    assert lines.index("all tasks") < lines.index("  ERROR    same versions       keras 1; keras 2")
    assert "  worker 0 - worker 1  96.0 Mbit/s     -      200 µs  -500 ms (± 100 µs)" in lines
    assert [line for line in lines if line.startswith("  uncompressed")] == [
        "  uncompressed         53.3 MB           4.8 s"
    ]
    assert '  suggested: compression="powersgd:4": at 88.0 Mbit/s; "int4" if its accuracy is too low' in lines
    assert lines[-1] == "1 error, 2 warnings"


def test_a_report_without_anything():
    assert to_text(Report(CheckContext({}, 1), ())).splitlines()[-1] == "0 errors, 0 warnings"
