"""Runs a script of `examples/` under `tfdist run`."""

from pathlib import Path

from child_environment import ROOT, run_python

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
    script_path = ROOT / "examples" / script
    return run_python(*launcher, script_path, *arguments, cwd=cwd, limit_seconds=LIMIT_SECONDS).stdout
