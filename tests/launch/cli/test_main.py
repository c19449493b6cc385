import argparse
import os
import subprocess
import sys

import pytest

import tfdist
from tfdist.launch.cli.main import main
from tfdist.launch.cli.run_options import add_options
from tfdist.launch.run_spec import RunSpec


@pytest.fixture(autouse=True)
def nothing_described(monkeypatch, environ, tmp_path):
    """Invalid commands run in this process and must start nothing."""
    for name in list(os.environ):
        if name not in environ:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tfdist {tfdist.__version__}\n"


@pytest.mark.parametrize(("arguments", "expected"), [(["--help"], "run"), (["run", "--help"], "--start-timeout S")])
def test_help(capsys, arguments, expected):
    assert main(arguments) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "A command is missing. Expected: one of run"),
        (["walk"], "invalid choice: 'walk'"),
        (["run", "script.py"], "The number of workers is missing. Received: neither --workers nor --plan."),
        (
            ["run", "--workers", "0", "script.py"],
            "--workers: Invalid number. Received: '0'. Expected: a whole number",
        ),
        (
            ["run", "--workers", "2", "--min-workers", "3", "script.py"],
            "--min-workers exceeds --workers. Received: --workers 2 --min-workers 3. Expected: --min-workers of at",
        ),
        (
            ["run", "--workers", "2", "--elastic", "3", "script.py"],
            "The least number of workers that train exceeds the number of workers. Received: --workers 2 --elastic 3.",
        ),
        (
            ["run", "--workers", "2", "--elastic", "1", "--parameter-servers", "1", "script.py"],
            "workers beside parameter servers are always restarted alone. Received: --elastic 1 --parameter-servers 1.",
        ),
        (
            ["run", "--workers", "2", "--elastic", "1", "--chief", "script.py"],
            "which are lost with it. Received: --elastic 1 --chief. Expected: one of them. Remove --elastic",
        ),
        (
            ["run", "--workers", "2", "--elastic", "1", "--min-workers", "1", "script.py"],
            "Received: --elastic 1 --min-workers 1. Expected: one of them. Remove --min-workers.",
        ),
        (
            ["run", "--workers", "2", "--elastic", "1:4", "--nodes", "2", "script.py"],
            "The number of workers grows on one host only. Received: --elastic 1:4 --nodes 2. Expected: --elastic 1.",
        ),
        (
            ["run", "--workers", "1", "--elastic", "1:4", "script.py"],
            "A run that may grow begins with 2 to MAX workers. Received: --workers 1 --elastic 1:4. Expected:",
        ),
        (
            ["run", "--workers", "5", "--elastic", "1:4", "script.py"],
            "Received: --workers 5 --elastic 1:4. Expected: --workers from 2 to 4.",
        ),
        (["run", "--workers", "2", "--elastic", "3:2", "script.py"], "MAX is less than MIN. Received: '3:2'."),
        (["run", "--workers", "2", "--elastic", "1:", "script.py"], "--elastic: Invalid number. Received: ''."),
        (
            ["run", "--workers", "2", "--control-socket", "run.sock", "script.py"],
            "Only an elastic run on one host changes its number of workers while it trains. Received: --control-socket",
        ),
        (
            ["run", "--workers", "1", "--error-file", "script.py/error.json", "script.py"],
            "The error file cannot be written. Received: script.py/error.json",
        ),
        (["run", "--workers", "1", "--network", "lan", "script.py"], "--network: invalid choice: 'lan'"),
        (["run", "--workers", "1", "--speed", "script.py"], "unrecognized arguments: --speed"),
        (["run", "--work", "1", "script.py"], "unrecognized arguments: --work"),
        (["run", "--workers", "1"], "The script is missing. Received: no script and no -m. Expected: tfdist run"),
        (["run", "--workers", "1", "-m"], "The module is missing. Received: -m . Expected: -m MODULE"),
        (["run", "--workers", "1", "none.py"], "The script does not exist. Received: 'none.py' in '/"),
        (["run", "--workers", "1", "."], "The script is not a file. Received: '.'. Expected: the path"),
        (["run", "--workers", "1", "--log-dir", "script.py", "script.py"], "The log files cannot be created. Received"),
    ],
)
def test_wrong_command(capfd, arguments, message):
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert "error: " in captured.err and not captured.out


SECONDS = ["--start-timeout", "--grace", "--restart-delay", "--heartbeat-timeout", "--stall-timeout"]
WHOLE_NUMBERS = {
    "--workers": 1,
    "--parameter-servers": 0,
    "--worker-restarts": 0,
    "--elastic": 1,
    "--max-restarts": 0,
    "--min-workers": 1,
    "--threads-per-worker": 1,
    "--nodes": 1,
    "--node-rank": 0,
}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *((flag, value) for flag in SECONDS for value in ("nan", "inf", "-inf", "-1", "five", "", "1e300")),
        ("--start-timeout", "0"),
        ("--start-timeout", "-0.0"),
        *((flag, value) for flag in WHOLE_NUMBERS for value in ("nan", "1.5", "-1", "two", "")),
        *((flag, "0") for flag, least in WHOLE_NUMBERS.items() if least == 1),
    ],
)
def test_invalid_number(capfd, flag, value):
    assert main(["run", "--workers", "2", f"{flag}={value}", "script.py"]) == 2
    expected = "a number of seconds" if flag in SECONDS else f"a whole number of at least {WHOLE_NUMBERS[flag]}"
    assert f"{flag}: Invalid number. Received: {value!r}. Expected: {expected}" in capfd.readouterr().err


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "0", "-1"])
def test_invalid_start_timeout_of_the_environment(capfd, monkeypatch, value):
    """The workers would fail with it, each under another name."""
    monkeypatch.setenv("TFDIST_START_TIMEOUT", value)
    assert main(["run", "--workers", "2", "script.py"]) == 2
    message = f"Invalid environment variable TFDIST_START_TIMEOUT. Received: TFDIST_START_TIMEOUT='{value}'. Expected:"
    assert message in capfd.readouterr().err


def test_options_of_a_run_are_read_as_they_were_written():
    spec = RunSpec(workers=3, elastic=1, worker_restarts=2, warm_spares=True)
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert RunSpec.of_options(parser.parse_args([*spec.arguments(), "script.py"])) == spec


def test_arguments_after_the_script_are_its_own(run):
    arguments = ["--workers", "9", "--help", "--", "-m", "a b", ""]
    assert run("print(sys.argv)", arguments=arguments).of(1) == [str(["script.py", *arguments])]


def test_module(environ, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys\nprint(f'{__name__} {sys.argv[1:]}')")
    command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "1", "-m", "package.train", "--epochs", "2"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert ended.stdout == "[0] __main__ ['--epochs', '2']\n"


def test_missing_module_is_reported_as_the_cause(environ, tmp_path):
    command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", "-m", "no_such_module"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1
    assert "No module named no_such_module" in ended.stderr.splitlines()[-1]
