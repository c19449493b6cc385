"""Compares what `tfdist plan` predicts with what is measured.

    python benchmarks/planning.py                          everything: about 20 minutes on two cores
    python benchmarks/planning.py --parts grid             8 minutes
    python benchmarks/planning.py --from-json              prints and draws the last results again

*grid*: the models and links of `benchmarks/network.py`; *unseen*: an LSTM and a GAN at 300 Mbit/s. For each model the
program is probed once, and planned for each link; then two workers, each on its own core and in its own network
namespace, train it by `fit` with several methods, with the planned one, and with XLA.

*memory*: largest resident memory of a worker of `tfdist run`. *workers*: two, three and four workers of `tfdist run`
that share the cores of this machine.

Nothing is fitted on what is measured here. Needs root on Linux, `ip` and `tc`. Writes `planning.json` and
`planning.png` to `benchmarks/results`.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network_run import schedule, variants
from network_run.links import Network
from network_run.machine import machine_info
from network_run.worker_processes import WorkerProcesses
from planning_run import predictions, scores

_FILE = Path(__file__).parent / "results" / "planning.json"
_GRID_MODELS, _UNSEEN_MODELS, _UNSEEN_LINK = ("cnn", "mlp", "text"), ("lstm", "gan"), "300 Mbit/s"
_METHODS, _WORKERS, _STEPS = (None, "int8", "powersgd:4"), (2, 3, 4), 24  # of memory and of more workers
_MEASURED = ("dense", "bf16", "int8", "topk:0.01", "powersgd:4", "powersgd:1")
_COMPILED = "fit dense, XLA"  # XLA is measured without compression, and with the method of the best plan


def compare(
    model: str, links: Sequence[str], turns: schedule.Schedule, earlier: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Plans and measures a model on each link; returns a cell for each. Times of `earlier` cells are not measured."""
    kept = {cell["link"]: cell["measured"] for cell in earlier if cell["model"] == model}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        _log(f"{model}: plans")
        probe = folder / "probe.json"
        start = time.monotonic()
        predictions.plan(probe, model)
        seconds = time.monotonic() - start
        planned = {
            link: predictions.plan(folder / "plan.json", model, rate=variants.LINKS[link], probe=probe)
            for link in links
        }
        predicted = {link: predictions.seconds_by_variant(document) for link, document in planned.items()}
        missing = [link for link in links if link not in kept]
        if missing:
            chosen = {next(iter(predicted[link])) for link in missing}
            names = [f"fit {name}" for name in _MEASURED]
            names = list(dict.fromkeys([*names, _COMPILED, *sorted(chosen)]))
            shown = [variants.BY_NAME[name] for name in names if name in variants.BY_NAME]
            kept |= _measured(model, shown, missing, turns, folder)
    return [
        {
            "model": model,
            "link": link,
            "plan_seconds": seconds,
            "predicted": predicted[link],
            "order": list(predicted[link]),
            "best_plan": planned[link]["plans"][0],
            "measured": kept[link],
            "measurements": planned[link]["measurements"],
        }
        for link in links
    ]


def _measured(
    model: str, shown: list[variants.Variant], links: Sequence[str], turns: schedule.Schedule, folder: Path
) -> dict[str, dict[str, float]]:
    """Returns by link and variant the median time of a step."""
    with (
        Network(2) as network,
        WorkerProcesses(variants.TENSORFLOW, sys.executable, network, model, folder) as workers,
    ):
        workers.call("make", names=[variant.name for variant in shown])
        schedule.warm_up({variants.TENSORFLOW: workers}, shown, _log)
        found = schedule.measure({variants.TENSORFLOW: workers}, network, shown, links, turns, _log)
    return {
        link: {name: summary["median_seconds"] for name, summary in of_link["variants"].items()}
        for link, of_link in found.items()
    }


def memory(models: Sequence[str], measurements: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns predicted and measured memory of a worker, by model and method; `measurements` are of earlier probes."""
    rows = []
    with tempfile.TemporaryDirectory() as text:
        for model in models:
            probe = predictions.probe_file(Path(text), measurements[model]) if model in measurements else None
            document = predictions.plan(Path(text) / "plan.json", model, probe=probe)
            for method in _METHODS:
                one = predictions.data_parallel(document, method)
                measured = predictions.train(document, one, model, Path(text), _STEPS)["memory_bytes"]
                what = f"{model}, {method or 'dense'}"
                rows.append({"what": what, "predicted": one["memory_bytes"], "measured": measured})
                _log(str(rows[-1]))
    return rows


def more_workers(model: str) -> list[dict[str, Any]]:
    """Returns predicted and measured step times of workers that share this machine's cores."""
    rows = []
    with tempfile.TemporaryDirectory() as text:
        document = predictions.plan(Path(text) / "plan.json", model, _WORKERS, shares_cores=True)
        for workers in _WORKERS:
            for method in _METHODS:
                one = predictions.data_parallel(document, method, workers)
                measured = predictions.train(document, one, model, Path(text), _STEPS)["step_seconds"]
                what = f"{model}, {workers} workers, {method or 'dense'}"
                rows.append({"what": what, "predicted": one["step_seconds"], "measured": measured})
                _log(str(rows[-1]))
    return rows


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Measures or reads earlier results; prints the tables and draws."""
    parts = ("grid", "unseen", "memory", "workers")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--models", nargs="+", choices=_GRID_MODELS, default=list(_GRID_MODELS))
    parser.add_argument("--links", nargs="+", choices=tuple(variants.GRID_LINKS), default=list(variants.DEFAULT_LINKS))
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant on each link")
    parser.add_argument("--turn-seconds", type=float, default=0.6, help="seconds of a turn with fast steps")
    parser.add_argument("--replan", action="store_true", help="plan again, and keep measured step times")
    parser.add_argument("--results", type=Path, default=_FILE)
    parser.add_argument("--from-json", action="store_true", help="read the results instead of measuring")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    turns = schedule.Schedule(rounds=arguments.rounds, turn_seconds=arguments.turn_seconds)
    wanted = () if arguments.from_json else arguments.parts

    def write() -> None:
        for cell in (*results.get("grid", ()), *results.get("unseen", ())):
            if "measurements" in cell:
                results.setdefault("measurements", {})[cell["model"]] = cell.pop("measurements")
        results["machine"] = machine_info()
        arguments.results.write_text(json.dumps(results, indent=1) + "\n")

    for model in arguments.models if "grid" in wanted else ():
        found = compare(model, arguments.links, turns, results.get("grid", []) if arguments.replan else [])
        # The measurements of a program belong to all of its cells.
        results["grid"] = [*(cell for cell in results.get("grid", []) if cell["model"] != model), *found]
        write()
    if "unseen" in wanted:
        earlier = results.get("unseen", []) if arguments.replan else []
        found = [cell for model in _UNSEEN_MODELS for cell in compare(model, [_UNSEEN_LINK], turns, earlier)]
        results["unseen"] = found
        write()
    if "memory" in wanted:
        results["memory"] = memory(arguments.models, results.get("measurements", {}))
        write()
    if "workers" in wanted:
        results["workers"] = more_workers("mlp")
        write()
    _print(results)
    cells = [*results.get("grid", []), *results.get("unseen", [])]
    if cells:
        from planning_run import plot

        plot.draw(cells, arguments.results.with_suffix(".png"))
    return 0


def _print(results: dict[str, Any]) -> None:
    if "grid" in results:
        scores.print_grid("The grid of network.json", results["grid"])
    if "unseen" in results:
        scores.print_grid("Models and a link that the grid does not hold", results["unseen"])
    cells = [*results.get("grid", []), *results.get("unseen", [])]
    if cells:
        print(f"\n`tfdist plan`: at most {max(cell['plan_seconds'] for cell in cells):.0f} s a program")
    if "memory" in results:
        scores.print_ratios("Memory of a worker, MB", results["memory"], scores.MEMORY_BAR, 1e6, 0)
    if "workers" in results:
        rows = results["workers"]
        scores.print_ratios(
            "Workers that share this machine's cores, ms a step", rows, scores.MORE_WORKERS_BAR, 1e-3, 1
        )


if __name__ == "__main__":
    sys.exit(main())
