"""Runs a script of examples/ by `tfdist run`."""

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
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", "run", *options, str(ROOT / "examples" / script), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
