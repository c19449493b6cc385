import os
import subprocess
import sys

import pytest

import tfdist
from tfdist.launch.main import main


@pytest.fixture(autouse=True)
def nothing_described(monkeypatch, environ, tmp_path):
    """The tests of wrong commands run here in this process: nothing may be started."""
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
        (["run", "script.py"], "the following arguments are required: --workers"),
        (
            ["run", "--workers", "0", "script.py"],
            "--workers: The number is wrong. Received: '0'. Expected: a whole number",
        ),
        (["run", "--workers", "-2", "script.py"], "--workers: The number is wrong. Received: '-2'. Expected"),
        (["run", "--workers", "two", "script.py"], "--workers: The number is wrong. Received: 'two'. Expected"),
        (["run", "--workers", "1.5", "script.py"], "Received: '1.5'"),
        (["run", "--workers", "1", "--grace", "-1", "script.py"], "--grace: The number is wrong. Received: '-1'"),
        (["run", "--workers", "1", "--grace", "inf", "script.py"], "Received: 'inf'. Expected: seconds"),
        (["run", "--workers", "1", "--start-timeout", "-5", "script.py"], "--start-timeout: The number is wrong."),
        (
            ["run", "--workers", "1", "--threads-per-worker", "0", "script.py"],
            "--threads-per-worker: The number is wrong",
        ),
        (["run", "--workers", "1", "--max-restarts", "-1", "script.py"], "--max-restarts: The number is wrong."),
        (["run", "--workers", "1", "--min-workers", "0", "script.py"], "--min-workers: The number is wrong."),
        (
            ["run", "--workers", "1", "--heartbeat-timeout", "x", "script.py"],
            "--heartbeat-timeout: The number is wrong",
        ),
        (["run", "--workers", "1", "--stall-timeout", "-1", "script.py"], "--stall-timeout: The number is wrong."),
        (["run", "--workers", "1", "--restart-delay", "nan", "script.py"], "--restart-delay: The number is wrong."),
        (
            ["run", "--workers", "2", "--min-workers", "3", "script.py"],
            "fewer workers than the least number. Received: --workers 2 --min-workers 3. Expected: --min-workers of at",
        ),
        (
            ["run", "--workers", "1", "--error-file", "script.py/error.json", "script.py"],
            "The error file cannot be written. Received: script.py/error.json",
        ),
        (["run", "--workers", "1", "--network", "lan", "script.py"], "--network: invalid choice: 'lan'"),
        (["run", "--workers", "1", "--speed", "script.py"], "unrecognized arguments: --speed"),
        (["run", "--work", "1", "script.py"], "--workers"),
        (["run", "--workers", "1"], "The script is missing. Received: no script and no -m. Expected: tfdist run"),
        (["run", "--workers", "1", "-m"], "The module is missing. Received: -m . Expected: -m MODULE"),
        (["run", "--workers", "1", "none.py"], "The script does not exist. Received: 'none.py' in '/"),
        (["run", "--workers", "1", "."], "The script is not a file. Received: '.'. Expected: the path"),
        (["run", "--workers", "1", "--log-dir", "script.py", "script.py"], "The log files cannot be made. Received"),
    ],
)
def test_wrong_command(capfd, arguments, message):
    assert main(arguments) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert "error: " in captured.err and not captured.out


def test_arguments_after_the_script_are_its_own(run):
    arguments = ["--workers", "9", "--help", "--", "-m", "a b", ""]
    assert run("print(sys.argv)", arguments=arguments).of(1) == [str(["script.py", *arguments])]


def test_module(environ, tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "1", "-m", "package.train", "--epochs", "2"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[0] __main__ ['--epochs', '2']\n"


def test_missing_module_is_reported_as_the_cause(environ, tmp_path):
    command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", "-m", "no_such_module"]
    ended = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "No module named no_such_module" in ended.stderr.splitlines()[-1]
