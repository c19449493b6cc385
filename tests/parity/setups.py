"""The three shapes of a cluster that every case runs on, and how one is started."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from child_environment import child_environment

_SCRIPT = Path(__file__).with_name("run_cases.py")
_LIMIT_SECONDS = 2400


@dataclass(frozen=True)
class Setup:
    """How many workers, and how many logical devices each."""

    workers: int
    devices: int

    def __str__(self) -> str:
        return f"{self.devices} local replicas" if self.workers == 1 else f"{self.workers} workers x {self.devices}"


SETUPS = (Setup(1, 2), Setup(2, 1), Setup(2, 2))


def run_cases(setup: Setup, output: Path, references: Path, names: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Runs the cases (all, or those of `names`) on `setup` and returns each one's result by its name.

    The outcomes of one process are kept in the folder `references` by the first run on local replicas.
    """
    launcher = [sys.executable]
    if setup.workers > 1:
        launcher += ["-m", "tfdist.launch", "run", "--workers", str(setup.workers)]
    command = [
        *launcher,
        str(_SCRIPT),
        f"--devices={setup.devices}",
        f"--output={output}",
        f"--references={references}",
        f"--cases={','.join(names)}",
    ]
    finished = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {finished.returncode}:\n{finished.stderr[-6000:]}")
    return json.loads(output.read_text())
