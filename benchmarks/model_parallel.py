"""Measures step time, bytes and memory of pipelines and of tensor parallelism beside PyTorch and Keras on JAX.

    python benchmarks/model_parallel.py --torch-python /path/to/another/venv/bin/python --jax-python /path/to/a/third

A Keras model and its equal in PyTorch are cut at the same places into two stages, each on its own core and in its own
network namespace, over an unshaped link and links of 1 Gbit/s and 100 Mbit/s. tfdist and PyTorch
(`torch.distributed.pipelining` on gloo) train with both schedules, the same batches, micro-batches and optimizer, and
one thread for operations; the variants take turns. One process with the complete model and batch is the reference. The
peak of the activations is measured with four stages. The workload `tensor` splits the variables of one stage over the
two workers, beside PyTorch's `torch.distributed.tensor.parallel` and Keras' `ModelParallel` on JAX, which has the same
layout map. Needs root on Linux, `ip` and `tc`. Writes `model_parallel.json` and `model_parallel.png` to
`benchmarks/results`; parts and workloads that are not selected keep their earlier results. `--from-json` prints and
draws them again.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from model_parallel_run import step_report
from model_parallel_run.pipeline_variants import BY_NAME, JAX, STAGED, TENSORFLOW, TORCH, WORKLOADS, Variant
from model_parallel_run.process_memory import RETURNING_MEMORY
from network_run import schedule
from network_run.links import Network
from network_run.machine import machine_info
from network_run.variants import LINKS, UNSHAPED
from network_run.worker_processes import WorkerProcesses

_RESULTS = Path(__file__).parent / "results"
_TIMED, _MEMORY = ("mlp", "transformer", "tensor"), "activations"
_LINKS = (UNSHAPED, "1 Gbit/s", "100 Mbit/s")
_WARM_UP_STEPS = 4
_MEMORY_STEPS = 2


def main() -> int:
    """Measures, writes the results and prints the tables."""
    arguments = _arguments()
    path: Path = arguments.output
    if not arguments.from_json:
        results = json.loads(path.read_text()) if path.exists() else {}
        try:
            measure(arguments, results)
        except RuntimeError as error:
            raise SystemExit(str(error)) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
    results = json.loads(path.read_text())
    print(step_report.markdown(results))
    if not arguments.no_plot:
        from model_parallel_run import step_plot

        step_plot.draw(results, path.with_suffix(".png"))
    return 0


def measure(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Runs the measurements that `arguments` select, and puts them into `results`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    started = time.monotonic()

    def log(line: str) -> None:
        print(f"[{time.monotonic() - started:6.0f} s] {line}", file=sys.stderr, flush=True)

    results["machine"] = machine_info()
    results.setdefault("versions", {})
    plan = schedule.Schedule(rounds=arguments.rounds, turn_seconds=arguments.turn_seconds)
    for name in arguments.workloads:
        log(name)
        if name == _MEMORY:
            chosen = [BY_NAME[variant] for variant in STAGED]
            with _Run(name, chosen, arguments, results, log, RETURNING_MEMORY) as run:
                results["memory"] = run.peaks()
        else:
            with _Run(name, list(WORKLOADS[name].variants), arguments, results, log) as run:
                links = schedule.measure(run.groups, run.network, run.variants, arguments.links, plan, log)
                found = {"parameters": run.parameters, "rounds": arguments.rounds, "links": links}
                results.setdefault("workloads", {})[name] = found


class _Run:
    """The workers of all frameworks, after some steps of all variants; a context manager that ends them.

    Attributes:
        groups: The workers by framework.
        network: Their links.
        variants: What they can run.
        parameters: The number of the model's parameters.
    """

    def __init__(
        self,
        workload: str,
        chosen: list[Variant],
        arguments: argparse.Namespace,
        results: dict[str, Any],
        log: Callable[[str], None],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.network, self.variants = Network(WORKLOADS[workload].workers), chosen
        self.groups: dict[str, WorkerProcesses] = {}
        self.parameters = 0
        pythons = {TENSORFLOW: sys.executable, TORCH: arguments.torch_python, JAX: arguments.jax_python}
        frameworks = {variant.framework for variant in chosen}
        self._pythons = {framework: python for framework, python in pythons.items() if framework in frameworks}
        self._workload, self._results, self._log = workload, results, log
        self._environment = environment
        self._stack = ExitStack()

    def __enter__(self) -> "_Run":
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self._stack.enter_context(self.network)
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        hosts, sizes = list(range(WORKLOADS[self._workload].workers)), {}
        chief = 0  # in the namespace of worker 0
        for framework, python in self._pythons.items():
            workers = WorkerProcesses(
                framework,
                python,
                self.network,
                self._workload,
                folder,
                room="model_parallel_run",
                hosts=[*hosts, chief] if framework == TENSORFLOW else hosts,
                extra_environment=self._environment,
            )
            self.groups[framework] = self._stack.enter_context(workers)
            names = [variant.name for variant in self.variants if variant.framework == framework]
            made = workers.call("make", names=names)[-1]
            sizes[framework] = made["sizes"]
            self._results["versions"] |= made["versions"]
        if any(of_framework != sizes[TENSORFLOW] for of_framework in sizes.values()):
            raise RuntimeError(
                f"The frameworks' models of {self._workload!r} differ. Received: variables of sizes {sizes}. Expected: "
                "equal sizes. Make model_parallel_run/torch_models.py match keras_models.py."
            )
        self.parameters = sum(sizes[TENSORFLOW])
        for variant in self.variants:
            answers = self.groups[variant.framework].call("run", variant=variant.name, steps=_WARM_UP_STEPS)
            seconds = max(sum(answer["seconds"]) for answer in answers)
            losses = [answer["loss"] for answer in answers if answer["loss"] is not None]
            self._log(f"  warm-up {variant.name}: {seconds:.1f} s, loss {losses[0]:.3f}")

    def peaks(self) -> dict[str, list[int]]:
        """Returns by variant and stage by how many bytes the memory of its process grows at most in a step."""
        found = {}
        for variant in self.variants:
            workers = self.groups[variant.framework]
            workers.call("start_peak")
            workers.call("run", variant=variant.name, steps=_MEMORY_STEPS)
            grown = [answer["bytes"] for answer in workers.call("peak")]
            found[variant.name] = grown[: WORKLOADS[self._workload].stages]
            self._log(f"  {variant.name}: {[round(one / 1e6) for one in found[variant.name]]} MB")
        return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workloads", nargs="+", choices=(*_TIMED, _MEMORY), default=[*_TIMED, _MEMORY])
    parser.add_argument("--links", nargs="+", choices=tuple(LINKS), default=list(_LINKS))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant on each link")
    parser.add_argument("--turn-seconds", type=float, default=1.2, help="seconds of a turn with fast steps")
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter with PyTorch; default: this one")
    parser.add_argument("--jax-python", default=sys.executable, help="an interpreter with JAX and Keras, for `tensor`")
    parser.add_argument("--output", type=Path, default=_RESULTS / "model_parallel.json")
    parser.add_argument("--from-json", action="store_true", help="print and draw the earlier results of --output")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing; matplotlib is not needed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
