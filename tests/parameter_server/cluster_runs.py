"""Runs the script of a chief with workers and parameter servers under `tfdist run`, and reads its results."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_FOREIGN = ("TF_CONFIG", "SLURM_", "TFDIST_", "JOB_COMPLETION_INDEX")
_LIMIT_SECONDS = 500


def run_chief(
    script: str,
    folder: Path,
    *arguments: str,
    workers: int = 2,
    servers: int = 1,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs `script folder arguments...` as the chief and returns what it writes to `results.json` in `folder`.

    The output of the launcher and all tasks is in `output.txt` in `folder`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    paths = [_HERE.parents[1], _HERE.parent / "parity", _HERE.parent / "strategies"]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TF_CPP_MIN_LOG_LEVEL": "3", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(workers)]
    command += ["--parameter-servers", str(servers), *options, str(_HERE / script), str(folder), *arguments]
    output = folder / "output.txt"
    with output.open("w") as file:
        finished = subprocess.run(
            command, env=environment, stdout=file, stderr=file, timeout=_LIMIT_SECONDS, check=False
        )
    assert finished.returncode == 0, output.read_text()[-6000:]
    return json.loads((folder / "results.json").read_text())
