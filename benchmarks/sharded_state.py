"""Measures what sharded optimizer state costs and saves over shaped links, beside PyTorch's ZeroRedundancyOptimizer.

    python benchmarks/sharded_state.py --torch-python /path/to/another/venv/bin/python

Two workers, each on its own core and in its own network namespace, train an MLP of 10 M parameters with Adam: with
whole state, with sharded state, with rounded weights and gradients, and with PyTorch's DistributedDataParallel on gloo
with and without `ZeroRedundancyOptimizer`. The variants take turns, so that all run under the same conditions. Needs
root on Linux, `ip` and `tc`. Prints the table of `docs/sharded_state.md`.
"""

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from network_run import schedule, variants
from network_run.links import Network
from network_run.worker_processes import WorkerProcesses

_NAMES = ("dense", "sharded", "sharded, bf16 weights", "sharded, bf16", "torch dense", "torch ZeRO")
_LINKS = ("unshaped", "1 Gbit/s", "100 Mbit/s")


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has PyTorch")
    parser.add_argument("--workload", default="mlp", help="a model of benchmarks/workloads.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--links", nargs="+", choices=tuple(variants.LINKS), default=_LINKS)
    parser.add_argument("--variants", nargs="+", choices=tuple(variants.BY_NAME), default=_NAMES)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each variant on a link")
    parser.add_argument("--turn-seconds", type=float, default=1.2, help="duration of a turn with fast steps")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - started:6.0f} s] {line}", file=sys.stderr, flush=True)

    chosen = [variants.BY_NAME[name] for name in arguments.variants]
    pythons = {variants.TENSORFLOW: sys.executable, variants.TORCH: arguments.torch_python}
    with Network(arguments.workers) as network, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        groups = {}
        for framework in dict.fromkeys(variant.framework for variant in chosen):
            workers = WorkerProcesses(framework, pythons[framework], network, arguments.workload, Path(folder))
            groups[framework] = stack.enter_context(workers)
            names = [variant.name for variant in chosen if variant.framework == framework]
            made = groups[framework].call("make", names=names)[0]
            log(f"{framework}: {sum(made['sizes'])} parameters")
        schedule.warm_up(groups, chosen, log)
        held = {one.name: groups[one.processes].call("held_bytes", variant=one.name) for one in chosen}
        plan = schedule.Schedule(rounds=arguments.rounds, turn_seconds=arguments.turn_seconds)
        links = schedule.measure(groups, network, chosen, arguments.links, plan, log)
    _print_table(links, held)


def _print_table(links: dict[str, Any], held: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\n| | {' | '.join(links)} | sent in a step | slots of a worker |")
    print("|---|" + "---|" * (len(links) + 2))
    measured = [of_link["variants"] for of_link in links.values()]
    for name, summary in measured[0].items():
        times = " | ".join(f"{1000 * of_link[name]['median_seconds']:.1f} ms" for of_link in measured)
        slots = max(answer["value"] for answer in held[name])
        print(f"| {name} | {times} | {summary['payload_bytes'] / 1e6:.2f} MB | {slots / 1e6:.2f} MB |")
    for other in ("dense", "torch ZeRO"):
        if {"sharded", other} <= measured[0].keys():
            ratios = (of_link["sharded"]["median_seconds"] / of_link[other]["median_seconds"] for of_link in measured)
            print(f"\nsharded / {other}: {', '.join(f'{one:.2f}' for one in ratios)}")


if __name__ == "__main__":
    main()
