"""Writes the results of the kit as tables into `docs/gpu.md`, between comments that name them."""

import json
import re
from pathlib import Path
from typing import Any

from gpu_run.cases import METHODS

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "gpu.md"
_TWO_GPUS, _WORKERS = "`MirroredStrategy`, 2 logical GPUs", "2 workers on the card"
_X2 = f"{_WORKERS}, 2 logical GPUs each"
# What each case is, in the order of the table.
_WHAT = {
    "parity_replicas": (
        "CNN: batch statistics, accumulation, clipping, weights of samples, an uneven batch",
        _TWO_GPUS,
    ),
    "parity_workers": ("the same", _WORKERS),
    "parity_workers_x2": ("the same", _X2),
    "parity_servers": ("MLP with Adam and clipping", "`ParameterServerStrategy`, synchronous, 2 workers"),
    "suite_replicas": ("{} programs of `make parity`", _TWO_GPUS),
    "suite_workers": ("{} programs of `make parity`", _WORKERS),
    "suite_workers_x2": ("{} programs of `make parity`", _X2),
    "mixed_float16_replicas": ("the CNN, `mixed_float16` with loss scaling", _TWO_GPUS),
    "mixed_float16_workers": ("the same", _WORKERS),
    "overflow_replicas": ("`mixed_float16`, one replica overflows: scales and skipped updates", _TWO_GPUS),
    "overflow_workers": ("the same", _WORKERS),
    "mixed_bfloat16_replicas": ("the CNN, `mixed_bfloat16`", _TWO_GPUS),
    "mixed_bfloat16_workers": ("the same", _WORKERS),
    "jit_compile_replicas": ("the CNN, `jit_compile=True`, beside one process without it", _TWO_GPUS),
    "jit_compile_workers": ("the same", _WORKERS),
    "sharded_state_replicas": ("`shard_optimizer_state=True`", _TWO_GPUS),
    "sharded_state_workers": ("the same", _WORKERS),
    "pipeline": ("two stages, two micro-batches", "`ModelParallelStrategy`, 2 logical GPUs"),
    "tensor_parallel": ("layers split over two columns", "`ModelParallelStrategy`, 2 logical GPUs"),
    "recovery": ("a worker is killed, `FailureRecovery`, `--max-restarts`", _WORKERS),
    "elastic_workers": ("the CNN, `--elastic`: a worker is killed and joins again", "3 workers on the card"),
    "elastic_workers_x2": ("the same", _X2),
    "elastic_flipped_bit": ("the same, and a wrong bit is found by `WeightComparison`", "3 workers on the card"),
    "elastic_checked_gradients": ("`WeightComparison(check_gradients=0.5)`, TensorFloat-32", "3 workers on the card"),
    "nccl_one_worker": ("NCCL, the CNN", "1 worker"),
    "nccl_two_workers": ("NCCL, the CNN", _WORKERS),
    "doctor": ("`tfdist doctor` names the GPUs", "–"),
}
_COMPRESSION = "compression_"
_STRATEGIES = {
    "none": "one process, the whole batch",
    "tfdist-workers": "tfdist, two workers",
    "tfdist-elastic-workers": "tfdist, two workers, elastic",
    "stock-workers": "stock `MultiWorkerMirroredStrategy`, RING",
    "tfdist-replicas": "tfdist, `MirroredStrategy`, two logical GPUs",
    "stock-replicas": "stock `MirroredStrategy`, two logical GPUs",
    "torch-ddp": "PyTorch DDP on gloo, two ranks",
    "torch-none": "PyTorch, one process, the whole batch",
    "tfdist, one worker": "tfdist, one worker",
}
_FLAGS = {"xla": ", `jit_compile=True`", "loop": ", a custom loop", "": ""}
_MODELS = {"mlp": "MLP", "cnn": "CNN", "tiny": "tiny model"}
_SPEED = ("speed_workers", "speed_replicas", "speed_tiny")


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Returns the parts of the page by name, from what `benchmarks/gpu.py` has written."""
    cases = results["cases"]
    return {
        "machine": _machine(results["machine"], cases),
        "cases": _cases(cases),
        "steps": _steps(cases),
        "ratios": _ratios(cases),
        "codecs": _codecs(cases.get("speed_codecs")),
    }


def write(results: dict[str, Any], page: Path = PAGE) -> None:
    """Replaces what is between `<!-- gpu: NAME -->` and `<!-- gpu end -->`."""
    page.write_text(filled(results, page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(results: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the tables of these results."""
    for name, part in tables(results).items():
        pattern = rf"(<!-- gpu: {name} -->\n).*?(\n<!-- gpu end -->)"
        text = re.sub(pattern, lambda found, part=part: f"{found[1]}\n{part}{found[2]}", text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def read(file: Path) -> dict[str, Any]:
    """Returns the results in a file."""
    return json.loads(file.read_text())


def _machine(machine: dict[str, Any], cases: dict[str, Any]) -> str:
    gpus = "; ".join(_gpu(line) for line in machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    torch = f", PyTorch {machine['torch'].split(' ')[0]}" if machine["torch"] else ""
    failed = [name for name, row in cases.items() if not row["ok"]]
    state = f"{len(cases) - len(failed)} of {len(cases)} cases are as expected."
    return (
        f"{machine['date'][:10]}: {gpus}; {machine['cores']} cores of {machine['cpu']}; Python {machine['python']}, "
        f"{versions}{torch}. {state}\n"
    )


def _gpu(line: str) -> str:
    name, memory, driver, capability = (part.strip() for part in line.split(","))
    return f"{name} ({memory}, driver {driver}, compute capability {capability})"


def _cases(cases: dict[str, Any]) -> str:
    rows = [["what", "strategy", "result", "figure", "bar"], ["---"] * 5]
    for name, (what, strategy) in _WHAT.items():
        if name in cases:
            row = cases[name]
            rows.append([what.format(len(row.get("differences", ()))), strategy, *_outcome(name, row)])
    for method in METHODS:
        name = _COMPRESSION + method.partition(":")[0]
        if name in cases:
            rows.append([f'MLP, `compression="{method}"`', _WORKERS, *_outcome(name, cases[name])])
    return _table(rows)


def _outcome(name: str, row: dict[str, Any]) -> list[str]:
    """Returns the result, the figure and the bar."""
    if not row["ok"]:
        return ["**not as expected**", _cell(row.get("error", "")), ""]
    if name.startswith(_COMPRESSION):
        return ["as on CPUs", f"loss {row['loss']:.4f}, on CPUs {row['loss_on_cpu']:.4f}", "2 %"]
    if name == "recovery":
        return ["as undisturbed", _number(row["difference"]), "0"]
    if name == "doctor":
        return [_cell(row["said"]), "", "a GPU"]
    if "note" in row:
        return [row["note"], "", row.get("expected", "trains, or an error")]
    return ["as one process", _number(row["difference"]), _number(row["allowed"])]


def _number(value: float) -> str:
    return f"{value:.0e}" if 0 < value < 1e-3 else f"{value:.1g}"


def _steps(cases: dict[str, Any]) -> str:
    by_variant: dict[str, dict[str, float]] = {}
    for name in _SPEED:
        for variant, ms in cases.get(name, {}).get("ms", {}).items():
            model, _, rest = variant.partition(":")
            by_variant.setdefault(_label(rest), {}).setdefault(model, ms)
    if not by_variant:
        return "Not measured.\n"
    rows = [["ms a step", *_MODELS.values()], ["---", *["---:"] * len(_MODELS)]]
    for label, found in by_variant.items():
        rows.append([label, *(f"{found[model]:.2f}" if model in found else "" for model in _MODELS)])
    errors = [f"{which}: {_cell(error)}" for name in _SPEED for which, error in _errors(cases, name).items()]
    return _table(rows) + "".join(f"\n{error}\n" for error in errors)


def _label(variant: str) -> str:
    strategy, _, flag = variant.partition("+")
    kind, _, method = strategy.partition(":")
    return _STRATEGIES.get(kind, kind) + (f", `{method}`" if method else "") + _FLAGS[flag]


def _errors(cases: dict[str, Any], name: str) -> dict[str, str]:
    row = cases.get(name, {})
    return {**row.get("errors", {}), **({name: row["error"]} if "error" in row else {})}


def _ratios(cases: dict[str, Any]) -> str:
    places = {"speed_workers": "two workers", "speed_replicas": "two logical GPUs", "speed_tiny": "tiny model"}
    rows = [["a step of", "relative to", "ratio"], ["---", "---", "---:"]]
    for name, place in places.items():
        for ratio, value in cases.get(name, {}).get("ratios", {}).items():
            ours, _, other = ratio.partition(" / ")
            model, _, rest = ours.partition(", ")
            label = ", ".join(filter(None, (place, _MODELS.get(model, model), rest)))
            rows.append([label, other, f"{value:.2f}"])
    return _table(rows) if len(rows) > 2 else "Not measured.\n"


def _codecs(row: dict[str, Any] | None) -> str:
    if not row or not row["ok"]:
        return "Not measured.\n"
    devices = {"GPU:0": "GPU", "CPU:0": "all cores"}
    found = {label: row["codecs"][device] for device, label in devices.items() if device in row["codecs"]}
    parts = [(label, part) for label in found for part in ("encode", "decode")]
    rows = [["GB/s", *(f"{label}, {part}" for label, part in parts)], ["---", *["---:"] * len(parts)]]
    for method in next(iter(found.values())):
        rows.append([method, *(f"{found[label][method][f'{part}_gb_s']:.1f}" for label, part in parts)])
    copies = row["copies"]
    megabytes = 1e3 * row["gigabytes"]
    return _table(rows) + (
        f"\nCopies of {megabytes:.0f} MB on the way of the exchange: GPU to host {copies['to_host_gb_s']:.1f} GB/s, "
        f"host to GPU {copies['to_device_gb_s']:.1f} GB/s.\n"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", ";")[:200]


def _table(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
