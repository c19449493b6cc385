"""Measures step time and bytes of data-parallel training over shaped links, with tfdist and with its peers.

    python benchmarks/network.py --torch-python /path/to/another/venv/bin/python

Two workers, each on its own core and in its own network namespace, train a CNN, an MLP of 10 M parameters and a small
transformer over an unshaped link and links of 1 Gbit/s and 100 Mbit/s: without gradient exchange (floor), with stock
`tf.distribute`, with every method of tfdist, and with PyTorch's DistributedDataParallel on gloo. "shared memory" has
both workers in one namespace, as on one host. `--variants` selects others: `fit`, Keras' DataParallel on JAX, and what
XLA or `torch.compile` compiles. The variants take turns, so that all run under the same conditions. Needs root on
Linux, `ip` and `tc`. Writes `network.json` and `network.png` to `benchmarks/results`; `--from-json` draws them again.
"""

import argparse
import importlib.util
import json
import platform
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from network_run import result_tables, schedule, variants
from network_run.links import Network
from network_run.machine import machine_info
from network_run.worker_processes import WorkerProcesses

_RESULTS = Path(__file__).parent / "results"
_WORKLOADS = ("cnn", "mlp", "text")


def main() -> int:
    """Measures, writes the results and prints the tables."""
    arguments = _arguments()
    if arguments.from_json:
        path = arguments.from_json
        results = json.loads(path.read_text())
    else:
        path = arguments.output
        try:
            results = measure(arguments)
        except RuntimeError as error:
            raise SystemExit(str(error)) from error
    print(result_tables.markdown(results))
    if not arguments.no_plot and results["workers"] == 2:
        from network_run import plot

        plot.draw(results, path.with_suffix(".png"))
    if arguments.write_pages:
        from network_run import docs_pages

        docs_pages.write(path)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the measurements that `arguments` select, writes after each workload, and always removes the network."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    chosen = [variants.BY_NAME[name] for name in arguments.variants]
    # TensorFlow's workers first: they store the batches of all.
    kinds = {one.processes: one for one in sorted(chosen, key=lambda one: one.framework != variants.TENSORFLOW)}
    pythons = {variants.TENSORFLOW: sys.executable}
    for framework, python in ((variants.TORCH, arguments.torch_python), (variants.JAX, arguments.jax_python)):
        if any(variant.framework == framework for variant in chosen):
            pythons[framework] = python or _this_python(framework)
    plan = schedule.Schedule(rounds=arguments.rounds, turn_seconds=arguments.turn_seconds)
    results: dict[str, Any] = {
        "workers": arguments.workers,
        "machine": machine_info(),
        "rounds": plan.rounds,
        "versions": {"python": platform.python_version()},
        "workloads": {},
    }
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - started:6.0f} s] {line}", file=sys.stderr, flush=True)

    for workload in arguments.workloads:
        log(workload)
        with Network(arguments.workers) as network, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            groups, sizes = {}, {}
            for group, first in kinds.items():
                workers = WorkerProcesses(
                    first.framework,
                    pythons[first.framework],
                    network,
                    workload,
                    Path(folder),
                    is_one_host=first.shares_memory,
                    name=group,
                )
                groups[group] = stack.enter_context(workers)
                made = workers.call("make", names=[one.name for one in chosen if one.processes == group])[0]
                sizes[first.framework] = made["sizes"]
                results["versions"] |= made["versions"]
            _refuse_different(workload, sizes)
            schedule.warm_up(groups, chosen, log)
            parameters = sum(next(iter(sizes.values())))
            links = schedule.measure(groups, network, chosen, arguments.links, plan, log)
            results["workloads"][workload] = {"parameters": parameters, "links": links}
        results["seconds"] = round(time.monotonic() - started)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return results


def _refuse_different(workload: str, sizes: dict[str, list[int]]) -> None:
    if len({tuple(of_framework) for of_framework in sizes.values()}) > 1:
        raise RuntimeError(
            f"The frameworks' models of {workload!r} differ. Received: variables of sizes {sizes}. Expected: equal "
            "sizes. Make benchmarks/network_run/torch_models.py match benchmarks/workloads.py."
        )


def _this_python(framework: str) -> str:
    if importlib.util.find_spec(framework) is None:
        raise SystemExit(
            f"The comparison needs {framework}. Received: an interpreter without it. Expected: one that can import it. "
            f"Choose another interpreter with --{framework}-python, or install it (`pip install {framework}`), or "
            "select other variants with --variants."
        )
    return sys.executable


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, choices=(2, 3, 4), default=2, help="more workers than cores share them")
    parser.add_argument("--workloads", nargs="+", choices=_WORKLOADS, help="default: all; with 3 or 4 workers the MLP")
    parser.add_argument("--links", nargs="+", choices=tuple(variants.LINKS), help="default: 3")
    parser.add_argument(
        "--variants", nargs="+", choices=tuple(variants.BY_NAME), help="default: most; with 3 or 4 workers, seven"
    )
    parser.add_argument("--rounds", type=int, help="turns of each variant on each link; default: 3")
    parser.add_argument(
        "--turn-seconds", type=float, default=0.5, help="seconds of a turn with fast steps; default: 0.5"
    )
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--torch-python", help="an interpreter with PyTorch; default: this one")
    parser.add_argument("--jax-python", help="an interpreter with JAX and Keras; default: this one")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/network.json")
    parser.add_argument("--from-json", type=Path, help="print earlier results, draw those of 2 workers")
    parser.add_argument("--write-pages", action="store_true", help="write the figures into the README and docs")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; matplotlib is not needed")
    arguments = parser.parse_args()
    many = arguments.workers > 2
    arguments.workloads = arguments.workloads or (["mlp"] if many else list(_WORKLOADS))
    arguments.links = arguments.links or list(variants.DEFAULT_LINKS)
    arguments.variants = arguments.variants or list(variants.FEW if many else variants.DEFAULT)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 3)
    file = f"network-{arguments.workers}.json" if many else "network.json"
    arguments.output = arguments.output or _RESULTS / file
    if arguments.rounds < 1:
        parser.error(f"Invalid --rounds. Received: {arguments.rounds}. Expected: an integer of at least 1.")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
