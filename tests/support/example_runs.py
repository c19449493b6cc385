"""Runs a script of examples/, by `tfdist run` or as it is."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 200


def run_example(script: str, *arguments: str, options: tuple[str, ...] = ("--workers", "2"), cwd: Path = ROOT) -> str:
    """What the workers show on standard output, once all have ended with 0.

    Args:
      script: below `examples`.
      *arguments: for the script.
      options: for `tfdist run`.
      cwd: where.
    """
    launcher = ["-m", "tfdist.launch", "run", *options]
    return run_python(*launcher, str(ROOT / "examples" / script), *arguments, cwd=cwd).stdout


def run_python(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """What `python *arguments` shows, once it has ended with 0."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
