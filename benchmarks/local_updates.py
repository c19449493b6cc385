"""Measures local updates: step time and bytes over a slow link, and learning against synchronous training.

    python benchmarks/local_updates.py                 both parts: 15 minutes on two cores
    python benchmarks/local_updates.py --parts link    two workers, an MLP of 10 M parameters over 10 Mbit/s
    python benchmarks/local_updates.py --parts learning   four workers learn digits and text
    python benchmarks/local_updates.py --from-json     prints and draws the last results again

*link*: two workers, each on its own core and in its own network namespace, train by `fit` with `DiLoCo`, an exchange
every 100 updates, int4, in fragments that are sent while steps run. The floor is the same `fit` without a strategy.
Steps are timed from the end of one to the end of the next, means over whole rounds of exchanges; the exchange at the
end of the epoch is timed separately. Needs root on Linux, `ip` and `tc`.

*learning*: the tasks of `benchmarks/accuracy.py` with four workers, an exchange every 20 updates, equal samples.

Writes `local_updates.json` and `local_updates.png` to `benchmarks/results`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from local_updates_run.compared_modes import ACCURACY_SYNC_EVERY, DILOCO, FLOOR, SYNC_EVERY, VARIANTS
from local_updates_run.plot import draw
from network_run.links import Network
from network_run.machine import machine_info
from network_run.variants import LINKS, TENSORFLOW
from network_run.worker_processes import WorkerProcesses

_FILE = Path(__file__).parent / "results" / "local_updates.json"
_OVERLAP = f"{DILOCO}, overlap"
_WARM_UP_STEPS = 30  # the first fragment is sent after 25
_BARS = {"digits": 0.5, "text": 3.0}


def measure_link(link: str, rounds: int, workload: str) -> dict[str, Any]:
    """Returns mean step times, and bytes a step, over a link."""
    start = time.monotonic()

    def log(what: str) -> None:
        print(f"  {what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    with Network(2) as network, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = WorkerProcesses(TENSORFLOW, sys.executable, network, workload, Path(folder), room="local_updates_run")
        stack.enter_context(workers)
        made = workers.call("make", names=[FLOOR, _OVERLAP])[0]
        log("models")
        for name in (FLOOR, _OVERLAP):
            workers.call("run", variant=name, steps=_WARM_UP_STEPS)
            log(f"warm-up {name}")
        network.shape(LINKS[link])
        steps: dict[str, list[float]] = {FLOOR: [], _OVERLAP: []}
        _add(steps[FLOOR], workers.call("run", variant=FLOOR, steps=rounds * SYNC_EVERY // 2))
        log("half of the floor")
        before = workers.call("count")
        answers = workers.call("run", variant=_OVERLAP, steps=rounds * SYNC_EVERY)
        after = workers.call("count")
        log(f"{rounds * SYNC_EVERY} steps, the last exchange {answers[0]['end_seconds']:.1f} s")
        _add(steps[FLOOR], workers.call("run", variant=FLOOR, steps=rounds * SYNC_EVERY // 2))
        _add(steps[_OVERLAP], answers)
        log("measured")
        network.shape(None)
        sent = statistics.mean(late["bytes"] - early["bytes"] for early, late in zip(before, after, strict=True))
        stated = statistics.mean(answer["stated"]["wire_bytes"] for answer in answers)
        at_end = statistics.mean(answer["stated_at_end"]["wire_bytes"] for answer in answers)
    dense = 4 * sum(made["sizes"])  # an all-reduce of two workers sends each value once
    number = rounds * SYNC_EVERY
    return {
        "link": link,
        "workload": workload,
        "parameters": sum(made["sizes"]),
        "versions": made["versions"],
        "steps": number,
        "floor_ms": 1000 * statistics.mean(steps[FLOOR]),
        "step_ms": 1000 * statistics.mean(steps[_OVERLAP]),
        "slowest_step_ms": 1000 * max(steps[_OVERLAP]),
        "end_seconds": statistics.mean(answer["end_seconds"] for answer in answers),
        "dense_bytes": dense,
        "bytes": stated / number,
        "bytes_with_end": (stated + at_end) / number,
        "interface_bytes_with_end": sent / number,
    }


def _add(seconds: list[float], answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        seconds += answer["seconds"][1:]  # the first step may be traced again


def measure_learning(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns for each task, seed and variant the held-out metric after each part of the training."""
    variants = ["synchronous", *(name for name in arguments.variants if name != "synchronous")]
    changes = [str(number) for number in (arguments.sync_every, arguments.steps, arguments.batch_size)]
    curves: dict[str, Any] = {}
    script = str(Path(__file__).parent / "local_updates_run" / "learning_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        for task in arguments.tasks:
            for seed in arguments.seeds:
                command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "4", script, folder]
                subprocess.run([*command, task, str(seed), *changes, *variants], check=True, env=_environment())
                curves.setdefault(task, {})[str(seed)] = json.loads((Path(folder) / f"{task}-{seed}.json").read_text())
    return curves


def _environment() -> dict[str, str]:
    paths = (Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[1] / "examples")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TF_CPP_MIN_LOG_LEVEL": "3"}


def print_link(result: dict[str, Any]) -> None:
    """Prints step times and bytes, and whether the bars are reached."""
    ratio, saving = result["step_ms"] / result["floor_ms"], result["dense_bytes"] / result["bytes"]
    with_end = result["dense_bytes"] / result["bytes_with_end"]
    print(f"\n{result['workload']}, {result['link']}, {result['steps']} steps\n")
    print("| floor | mean step | of the floor | slowest step | exchange at the end |\n|---|---|---|---|---|")
    end = f"{result['end_seconds']:.1f} s" if "end_seconds" in result else "not measured"
    print(
        f"| {result['floor_ms']:.1f} ms | {result['step_ms']:.1f} ms | {ratio:.3f} "
        f"| {result['slowest_step_ms']:.0f} ms | {end} |"
    )
    print("\n| dense, bytes a step | sent | of dense | with the end of the epoch |\n|---|---|---|---|")
    print(f"| {result['dense_bytes']:,} | {result['bytes']:,.0f} | 1/{saving:.0f} | 1/{with_end:.0f} |")


def print_learning(curves: dict[str, Any]) -> None:
    """Prints the metrics at the end, against synchronous training."""
    for task, by_seed in curves.items():
        bar, is_accuracy = _BARS[task], task == "digits"
        print(f"\n{task}, {len(by_seed)} seeds\n")
        print(f"| | held-out {'accuracy' if is_accuracy else 'loss'} | worse | bar | bytes of dense |")
        print("|---|---|---|---|---|")
        for name in next(iter(by_seed.values())):
            metric = statistics.mean(one[name][-1]["metric"] for one in by_seed.values())
            dense = statistics.mean(one["synchronous"][-1]["metric"] for one in by_seed.values())
            worse = 100 * (dense - metric if is_accuracy else metric / dense - 1)
            part = statistics.mean(one["synchronous"][-1]["bytes"] / one[name][-1]["bytes"] for one in by_seed.values())
            shown = f"{metric:.2%}" if is_accuracy else f"{metric:.3f}"
            unit = "points" if is_accuracy else "%"
            verdict = "reached" if worse <= bar else f"missed: {bar:g} {unit}"
            print(f"| {name} | {shown} | {worse:+.2f} {unit} | {verdict} | 1/{part:.0f} |")


def main() -> int:
    """Measures or reads earlier results; prints the tables and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("link", "learning"), default=["link", "learning"])
    parser.add_argument("--link", choices=tuple(LINKS), default="10 Mbit/s")
    parser.add_argument("--workload", default="mlp", help="a model of benchmarks/workloads.py")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of exchanges on the link")
    parser.add_argument("--tasks", nargs="+", choices=tuple(_BARS), default=list(_BARS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--sync-every", type=int, default=ACCURACY_SYNC_EVERY, help="updates between two exchanges")
    parser.add_argument("--steps", type=int, default=0, help="of a training; default: those of the task")
    parser.add_argument("--batch-size", type=int, default=0, help="of all workers; default: that of the task")
    parser.add_argument("--results", type=Path, default=_FILE)
    parser.add_argument("--from-json", action="store_true", help="read the results instead of measuring")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if not arguments.from_json:
        results["machine"] = machine_info()
        if "link" in arguments.parts:
            results["link"] = measure_link(arguments.link, arguments.rounds, arguments.workload)
        if "learning" in arguments.parts:
            results["learning"] = {**results.get("learning", {}), **measure_learning(arguments)}
        arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    if "link" in results:
        print_link(results["link"])
    if "learning" in results:
        print_learning(results["learning"])
        draw(results["learning"], arguments.results.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
