"""The rows of `docs/compared_with_stock.md`: programs that fail under stock Keras 3 and work under tfdist."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from child_environment import child_environment

from tfdist.utils.cores_and_ports import ReservedPorts

_SCRIPT = Path(__file__).with_name("run_rows.py")
_LIMIT_SECONDS = 90.0  # without progress
_WAIT_SECONDS = 10.0  # the same where a program is expected to wait indefinitely
_START_TIMEOUT_SECONDS = 5.0
_AT_ONCE = 3  # some programs only wait

Result = dict[str, Any]

DIFFERS, WAITS = "differs", "waits"


@dataclass(frozen=True)
class Row:
    """A program of `programs.py` and its expected results.

    Attributes:
      name: the function's name.
      program: its description in the table.
      stock: the fault of stock Keras: `DIFFERS`, `WAITS`, or part of its error message.
      rejection: part of tfdist's error message where an error is right; otherwise tfdist equals one process.
      workers: how many processes run it.
      peer_missing: whether it runs as a worker whose peer never starts.
    """

    name: str
    program: str
    stock: str = DIFFERS
    rejection: str = ""
    workers: int = 1
    peer_missing: bool = False


ROWS = (
    Row("fit_on_workers", "`model.fit` on 2 workers", "Attempt to convert a value (PerReplica", workers=2),
    Row("all_devices", "2 workers of 2 logical devices each", workers=2),
    Row(
        "missing_peer",
        "a worker that never starts",
        WAITS,
        rejection="no answer from worker 1 at 127.0.0.1",
        peer_missing=True,
    ),
    Row("accumulation", "`gradient_accumulation_steps=4`", "merge_call` called while defining a new graph"),
    Row("accumulation_with_averages", "the same, eager, with EMA and a learning-rate schedule"),
    Row("global_clipnorm", "`global_clipnorm`"),
    Row("overflow_on_a_replica", "`LossScaleOptimizer`, one replica overflows"),
    Row("overflow_on_a_worker", "`LossScaleOptimizer`, one of 2 workers overflows", WAITS, workers=2),
    Row("steps_per_execution", "`steps_per_execution=4`", "You must feed a value for placeholder tensor"),
    Row("two_strategies", "two strategies in one process", "Shape mismatch in the collective instance"),
    Row("uneven_batches", "batches of 23 on 2 replicas", "AddN must have the same size and shape"),
    Row("last_partial_batch", "a last batch of 3 on 2 replicas"),
    Row(
        "convolution_without_samples",
        "`Conv2D`, a last batch of 1 on 2 replicas",
        "ReluGrad must have the same size and shape",
    ),
    Row("masked_sequences", "masked sequences"),
    Row("loss_that_averages", "a loss function that returns the mean"),
    Row("seeded_shuffle", "`shuffle(seed=...)`"),
    Row("area_under_curve", "`AUC` in the logs of every batch"),
    Row("jit_compile", "`jit_compile=True` on CPUs", "Trying to access resource"),
)


def run_rows(rows: Sequence[Row] = ROWS) -> dict[str, dict[str, Result]]:
    """Runs every row under both libraries; returns `{row: {"stock": result, "tfdist": result}}`.

    A result holds the `difference` from one process, the `error`, the seconds it `waits`, or the exit code (`ended`).
    Each stock program has its own process, because a failing one may crash it.
    """
    together = [[row for row in rows if row.workers == n and not row.peer_missing] for n in (1, 2)]
    waiting = [[row] for row in rows if row.stock == WAITS]
    jobs = [("stock", group) for group in waiting]
    jobs += [("tfdist", group) for group in [*together, [row for row in rows if row.peer_missing]] if group]
    jobs += [("stock", [row]) for row in rows if [row] not in waiting]
    results: dict[str, dict[str, Result]] = {row.name: {} for row in rows}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        running = [pool.submit(_run, *job, Path(folder) / f"{i}.json") for i, job in enumerate(jobs)]
        for (library, _), future in zip(jobs, running, strict=True):
            for name, result in future.result().items():
                results[name][library] = result
    return results


def _run(library: str, rows: list[Row], output: Path) -> dict[str, Result]:
    """Runs programs one after another in one process, or one cluster, until one of them makes no progress."""
    names = [row.name for row in rows]
    limit = _WAIT_SECONDS if library == "stock" and rows[0].stock == WAITS else _LIMIT_SECONDS
    command = [str(_SCRIPT), f"--library={library}", f"--programs={','.join(names)}", f"--output={output}"]
    if rows[0].workers > 1:
        command = ["-m", "tfdist.launch", "run", "--workers", str(rows[0].workers), "--grace", "1", *command]
    environment = child_environment()
    if rows[0].peer_missing:
        environment |= {"TF_CONFIG": _with_a_missing_peer(), "TFDIST_START_TIMEOUT": str(_START_TIMEOUT_SECONDS)}
    log = output.with_suffix(".log")
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
        )
        stopped = False
        try:
            started = time.time()
            while process.poll() is None and not stopped:
                time.sleep(0.05)
                progress = output.stat().st_mtime + limit if output.exists() else started + _LIMIT_SECONDS
                stopped = time.time() > progress
        finally:
            if process.poll() is None:
                # The launcher ends its workers; a waiting TensorFlow does not react to SIGTERM.
                process.terminate() if rows[0].workers > 1 else process.kill()
            process.wait()
    results = json.loads(output.read_text()) if output.exists() else {}
    last = (log.read_text().strip() or "no output").splitlines()[-1]
    unfinished = {"waits": limit} if stopped else {"ended": process.returncode, "error": f"process ended: {last}"}
    return {name: unfinished if not results.get(name) else results[name] for name in names}


def _with_a_missing_peer() -> str:
    with ReservedPorts(2) as reserved:
        addresses = [f"127.0.0.1:{port}" for port in reserved.ports]
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}})


def describe(row: Row, library: str, result: Result) -> str:
    """The table's cell for a result."""
    if "waits" in result:
        return f"still waits after {result['waits']:g} s"
    if "error" in result:
        expected = row.stock if library == "stock" else row.rejection
        whole = re.sub(r"\x1b\[[0-9;]*m", "", result["error"])
        if not expected or expected not in whole:
            return f"fails: `{_cut(whole.strip().splitlines()[0])}`"
        return f"{'fails' if library == 'stock' else 'rejects'}: `{_cut(expected)} …`"
    if result["shown"]:
        return result["shown"]
    difference = result["difference"]
    return f"differs by {difference:.1g}" if library == "stock" else f"equal to {difference:.0e}"


def _cut(text: str, length: int = 72) -> str:
    text = text.replace("`", "").replace("|", "/").strip()
    return text if len(text) <= length else f"{text[:length].rsplit(' ', 1)[0]} …"
