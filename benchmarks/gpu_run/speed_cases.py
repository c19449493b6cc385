"""The cases that time steps, encodings and copies: each runs alone on the machine."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_run.cases import WORKERS, Case, Machine
from gpu_run.limited_processes import CaseError, environment, finish

_PROGRAMS = Path(__file__).parent
_LIMIT_SECONDS = 90.0
_BATCH_OF_A_WORKER = 256
_SIZES = {"features": 1024, "width": 2048, "side": 32}  # ten million parameters, 40 MB
_SMALL_SIZES = {"features": 16, "width": 32, "side": 8}
_METHODS = ("bf16", "int8", "powersgd:4")
_VALUES, _SMALL_VALUES = 10_485_760, 4096


def _sizes(machine: Machine, workers: int) -> str:
    batch = workers * (4 if machine.is_small else _BATCH_OF_A_WORKER)
    return json.dumps({**(_SMALL_SIZES if machine.is_small else _SIZES), "batch": batch})


def _turns(machine: Machine, steps: int, rounds: int) -> list[str]:
    if machine.is_small:
        steps, rounds = 3, 1
    return [f"--steps={steps}", f"--rounds={rounds}"]


def _fitted(
    machine: Machine,
    name: str,
    variants: Sequence[str],
    *,
    launcher: Sequence[str] = (),
    logical: int = 1,
    steps: int = 20,
    rounds: int = 5,
) -> dict[str, Any]:
    """Runs `speed_program`, returns what it has written."""
    output = machine.folder / f"{name}.json"
    start = [sys.executable]
    if launcher:
        start += ["-m", "tfdist.launch", "run", "--start-timeout", "60", *launcher]
    command = [*start, str(_PROGRAMS / "speed_program.py"), f"--variants={','.join(variants)}"]
    command += [f"--kind={machine.kind}", f"--logical={logical}", f"--sizes={_sizes(machine, 2)}"]
    command += [*_turns(machine, steps, rounds), f"--output={output}"]
    finish(command, environment(uses_gpu=machine.kind == "GPU", is_exact=False), limit_seconds=_LIMIT_SECONDS)
    return json.loads(output.read_text())


def _torch(machine: Machine, workers: int) -> dict[str, Any]:
    """Runs `torch_speed` on as many ranks, returns what it has written."""
    if not machine.torch_python:
        raise CaseError("no --torch-python")
    output = machine.folder / f"torch-{workers}.json"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sizes = json.loads(_sizes(machine, 2))
    sizes["batch"] //= workers
    device = "cuda" if machine.kind == "GPU" else "cpu"
    command = [machine.torch_python, str(_PROGRAMS / "torch_speed.py"), f"--workers={workers}", f"--port={port}"]
    command += [f"--device={device}", f"--sizes={json.dumps(sizes)}", *_turns(machine, 20, 5), f"--output={output}"]
    environ = environment(uses_gpu=machine.kind == "GPU", is_exact=False)
    errors: list[str] = []

    def run(rank: int) -> None:
        try:
            finish([*command, f"--rank={rank}"], environ, limit_seconds=_LIMIT_SECONDS)
        except CaseError as error:
            errors.append(f"rank {rank}: {error}")

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if errors:
        raise CaseError("; ".join(errors))
    return json.loads(output.read_text())


def _speed_workers(machine: Machine) -> dict[str, Any]:
    """Two workers on one card, of the same global batch as one process, PyTorch and TensorFlow's own strategy."""
    ours = ["mlp:tfdist-workers", "mlp:tfdist-workers+xla", *(f"mlp:tfdist-workers:{method}" for method in _METHODS)]
    ours += ["cnn:tfdist-workers", "cnn:tfdist-workers+xla", "mlp:tfdist-workers+loop", "cnn:tfdist-workers+loop"]
    elastic = [f"{model}:tfdist-elastic-workers" for model in ("mlp", "cnn")]  # all strategies of a process, or none
    alone = ["mlp:none", "mlp:none+xla", "cnn:none", "cnn:none+xla"]
    stock = ["mlp:stock-workers+loop", "cnn:stock-workers+loop"]
    row = _Row(_fitted(machine, "speed-workers", ours, launcher=WORKERS))
    row.add("", lambda: _fitted(machine, "speed-elastic", elastic, launcher=WORKERS))
    row.add("", lambda: _fitted(machine, "speed-one", alone))
    row.add("stock workers, RING", lambda: _fitted(machine, "speed-stock", stock, launcher=WORKERS))
    row.add("torch ddp", lambda: _named(_torch(machine, 2), "torch-ddp"))
    row.add("torch one", lambda: _named(_torch(machine, 1), "torch-none"))
    for model in ("mlp", "cnn"):
        us = f"{model}:tfdist-workers"
        row.divide(f"{model} / PyTorch DDP", us, f"{model}:torch-ddp")
        row.divide(f"{model} / stock, RING, a loop both", f"{us}+loop", f"{model}:stock-workers+loop")
        row.divide(f"{model}, elastic / not elastic", f"{model}:tfdist-elastic-workers", us)
        row.divide(f"{model} / one process", us, f"{model}:none")
        row.divide(f"{model} / one process, XLA both", f"{us}+xla", f"{model}:none+xla")
        row.divide(f"{model}, PyTorch DDP / PyTorch's one process", f"{model}:torch-ddp", f"{model}:torch-none")
    for method in _METHODS:
        row.divide(f"mlp, {method} / uncompressed", f"mlp:tfdist-workers:{method}", "mlp:tfdist-workers")
    return row.finished()


def _speed_replicas(machine: Machine) -> dict[str, Any]:
    """Two logical GPUs of one card, in one process with TensorFlow's own strategy and without a strategy."""
    both = ("stock-replicas", "tfdist-replicas")
    strategies = ("none", *both, "tfdist-replicas+xla", *(f"{name}+loop" for name in both))
    variants = [f"{model}:{name}" for model in ("mlp", "cnn") for name in strategies]
    row = _Row(_fitted(machine, "speed-replicas", variants, logical=2))
    for model in ("mlp", "cnn"):
        row.divide(f"{model} / stock", f"{model}:tfdist-replicas", f"{model}:stock-replicas")
        row.divide(f"{model} / stock, a loop both", f"{model}:tfdist-replicas+loop", f"{model}:stock-replicas+loop")
        row.divide(f"{model} / one device", f"{model}:tfdist-replicas", f"{model}:none")
    return row.finished()


def _speed_tiny(machine: Machine) -> dict[str, Any]:
    """What `fit` adds to a step of a model with 20,000 parameters."""
    turns: dict[str, Any] = {"steps": 300, "rounds": 3}
    row = _Row(_fitted(machine, "speed-tiny", ["tiny:none", "tiny:tfdist-workers"], **turns))
    row.rename("tiny:tfdist-workers", "tiny:tfdist, one worker")
    row.add("", lambda: _fitted(machine, "speed-tiny-2", ["tiny:tfdist-workers"], launcher=WORKERS, **turns))
    elastic = ["tiny:tfdist-elastic-workers"]
    row.add("", lambda: _fitted(machine, "speed-tiny-elastic", elastic, launcher=WORKERS, **turns))
    row.divide("one worker / Keras", "tiny:tfdist, one worker", "tiny:none")
    row.divide("two workers, elastic / not elastic", "tiny:tfdist-elastic-workers", "tiny:tfdist-workers")
    row.divide("two workers / Keras", "tiny:tfdist-workers", "tiny:none")
    return row.finished()


class _Row:
    """Milliseconds of a step by variant, their ratios, and the errors of what is only compared with."""

    def __init__(self, ours: dict[str, Any]) -> None:
        self._found: dict[str, Any] = {"ms": dict(ours["ms"]), "ratios": {}}
        self._parameters = dict(ours["parameters"])
        self._device = next(iter(ours["devices"].values()))[-5:]
        self._errors: dict[str, str] = {}
        self._ok = True

    def add(self, name: str, run: Any) -> None:
        """Adds the figures of other programs, or their error, which fails the case where they have no name."""
        try:
            found = run()
        except CaseError as error:
            self._errors[name or "tfdist"] = str(error)
            self._ok = self._ok and bool(name)
            return
        self._found["ms"] |= found["ms"]
        self._parameters |= found["parameters"]

    def rename(self, old: str, new: str) -> None:
        """Gives a variant another name."""
        self._found["ms"][new] = self._found["ms"].pop(old)

    def divide(self, name: str, one: str, other: str) -> None:
        """Adds a ratio, if both were measured."""
        ms = self._found["ms"]
        if one in ms and other in ms:
            self._found["ratios"][name] = ms[one] / ms[other]

    def finished(self) -> dict[str, Any]:
        """Returns the row; all programs must have trained as many parameters."""
        by_model: dict[str, set[int]] = {}
        for name, count in self._parameters.items():
            by_model.setdefault(name.partition(":")[0], set()).add(count)
        unequal = {model: sorted(counts) for model, counts in by_model.items() if len(counts) > 1}
        row = {"ok": self._ok and not unequal, **self._found, "device": self._device}
        row["parameters"] = {model: max(counts) for model, counts in by_model.items()}
        if self._errors:
            row["errors"] = self._errors
        if unequal:
            row["error"] = f"models of different numbers of parameters: {unequal}"
        return row


def _named(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {part: {f"{model}:{name}": value for model, value in found[part].items()} for part in ("ms", "parameters")}


def _speed_codecs(machine: Machine) -> dict[str, Any]:
    """GB/s of uncompressed values: encoding and decoding on the GPU and on all cores, and copies of 40 MB."""
    output = machine.folder / "codecs.json"
    devices = "GPU:0,CPU:0" if machine.kind == "GPU" else "CPU:0"
    command = [sys.executable, str(_PROGRAMS / "speed_codecs.py"), f"--devices={devices}", f"--output={output}"]
    command += [f"--values={_SMALL_VALUES if machine.is_small else _VALUES}"]
    command += [f"--rounds={1 if machine.is_small else 9}"]
    finish(command, environment(uses_gpu=machine.kind == "GPU", is_exact=False), limit_seconds=_LIMIT_SECONDS)
    found = json.loads(output.read_text())
    return {"ok": True, "gigabytes": found.pop("gigabytes")["dense"], "copies": found.pop("copies"), "codecs": found}


def _doctor(machine: Machine) -> dict[str, Any]:
    """`tfdist doctor` names the GPUs that TensorFlow sees."""
    command = [sys.executable, "-m", "tfdist.launch", "doctor", "--json"]
    finished = finish(command, environment(uses_gpu=machine.kind == "GPU"), limit_seconds=60.0, may_fail=True)
    lines = [line for line in finished.output.splitlines() if '"devices"' in line or "GPU" in line]
    with contextlib.suppress(json.JSONDecodeError):
        lines = [found["found"] for found in _findings(json.loads(finished.output)) if found.get("check") == "devices"]
    said = " | ".join(lines)
    row: dict[str, Any] = {"ok": bool(said) and (machine.kind == "CPU" or " GPU" in said), "said": said}
    if not row["ok"]:
        row["error"] = finished.last_lines() or finished.output[-500:]
    return row


def _findings(document: Any) -> list[dict[str, Any]]:
    if isinstance(document, dict):
        own = [document] if "check" in document else []
        return own + [found for value in document.values() for found in _findings(value)]
    return [found for value in document for found in _findings(value)] if isinstance(document, list) else []


SPEED_CASES = (
    Case("doctor", _doctor),
    Case("speed_workers", _speed_workers),
    Case("speed_replicas", _speed_replicas),
    Case("speed_tiny", _speed_tiny),
    Case("speed_codecs", _speed_codecs),
)
