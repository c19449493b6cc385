"""Runs `tfdist plan` on `planning_run/program.py`, and finds the plans of the benchmark's variants."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network_run.variants import BY_NAME, FIT, Variant

_PROGRAM = Path(__file__).parent / "program.py"
_BENCHMARKS = Path(__file__).resolve().parents[1]
_TIMEOUT = "150"  # that all methods are measured
_FORMAT = 1  # of the files of `tfdist plan --json`
_BATCH_OF = 2  # how many batches of a worker are a global batch


def environment() -> dict[str, str]:
    """Returns the environment of programs that import this repository and the benchmarks."""
    paths = (str(_BENCHMARKS), str(_BENCHMARKS.parent))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}


def plan(
    file: Path,
    model: str,
    workers: Sequence[int] = (2,),
    *,
    rate: int | None = None,
    probe: Path | None = None,
    shares_cores: bool = False,
) -> dict[str, Any]:
    """Plans the program for a link, and returns the document.

    Args:
        file: Where it is written.
        model: Key of `workloads.WORKLOADS`.
        workers: Numbers of workers.
        rate: Bits per second of the link; None: as between processes of this machine.
        probe: The file of an earlier plan of this model, whose measurements are used.
        shares_cores: Whether all workers share this machine's cores; else each has one.
    """
    command = [sys.executable, "-m", "tfdist.launch", "plan", "--allow-compression", "--timeout", _TIMEOUT]
    command += ["--json", str(file)]
    command += [] if shares_cores or probe else ["--cores-per-worker", "1"]
    command += ["--workers", ",".join(map(str, workers))]
    command += ["--link", f"{rate // 1000}kbit"] if rate else []
    command += ["--probe", str(probe)] if probe else [str(_PROGRAM), model, str(_BATCH_OF)]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL, timeout=600)
    return dict(json.loads(file.read_text()))


def probe_file(folder: Path, measurements: dict[str, Any]) -> Path:
    """Writes measurements as a file for `--probe`."""
    file = folder / "probe.json"
    document = {"format": _FORMAT, "plans": [], "too_large": [], "measurements": measurements, "link": {}}
    file.write_text(json.dumps(document))
    return file


def variant_of(one: dict[str, Any]) -> Variant | None:
    """Returns the variant of a plan; None if the benchmark has no such variant.

    >>> strategy = {"name": "MultiWorkerMirroredStrategy", "arguments": {"compression": "int8"}}
    >>> variant_of({"strategy": strategy, "compression": "int8", "jit_compile": True, "workers": 2}).name
    'fit int8, XLA'
    """
    if one["strategy"]["name"] != "MultiWorkerMirroredStrategy" or set(one["strategy"]["arguments"]) - {"compression"}:
        return None
    name = f"fit {one['compression'] or 'dense'}{', XLA' * one['jit_compile']}"
    found = BY_NAME.get(name)
    return found if found is not None and found.reduction == FIT else None


def seconds_by_variant(document: dict[str, Any], workers: int = 2) -> dict[str, float]:
    """Returns the predicted time of a step by the name of the variant, best first."""
    found = {}
    for one in document["plans"]:
        variant = variant_of(one)
        if variant is not None and one["workers"] == workers:
            found[variant.name] = one["step_seconds"]
    return found


def data_parallel(document: dict[str, Any], compression: str | None, workers: int = 2) -> dict[str, Any]:
    """Returns the plan of synchronous workers with a method, without XLA."""
    for one in document["plans"]:
        if (one["compression"], one["jit_compile"], one["workers"]) == (compression, False, workers):
            if variant_of(one) is not None:
                return dict(one)
    raise ValueError(f"No such plan. Received: compression={compression!r}. Expected: a method that is planned.")


def train(document: dict[str, Any], one: dict[str, Any], model: str, folder: Path, steps: int) -> dict[str, float]:
    """Trains by a single plan on this machine; returns what `program.py` writes."""
    only, written = folder / "only.json", folder / "written.json"
    only.write_text(json.dumps({**document, "plans": [one]}))
    command = [sys.executable, "-m", "tfdist.launch", "run", "--plan", str(only), str(_PROGRAM), model, str(_BATCH_OF)]
    subprocess.run([*command, str(steps), str(written)], check=True, env=environment(), timeout=600)
    return dict(json.loads(written.read_text()))
