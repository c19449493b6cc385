"""Runs a script of `examples/` under `tfdist run` or with Python."""

import subprocess
import sys
from pathlib import Path

from child_environment import ROOT, child_environment

LIMIT_SECONDS = 900


def run_example(script: str, *arguments: str, options: tuple[str, ...] = ("--workers", "2"), cwd: Path = ROOT) -> str:
    """Runs a script under `tfdist run` and returns its standard output; the exit code must be 0.

    Args:
        script: path below `examples`.
        *arguments: arguments of the script.
        options: options of `tfdist run`.
        cwd: working directory.
    """
    launcher = ["-m", "tfdist.launch", "run", *options]
    return run_python(*launcher, str(ROOT / "examples" / script), *arguments, cwd=cwd).stdout


def run_python(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Runs `python *arguments`; the exit code must be 0."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
