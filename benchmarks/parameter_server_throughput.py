"""Measures the throughput of training with parameter servers, compared with Keras 2 (tf_keras), and with a slow worker.

    python benchmarks/parameter_server_throughput.py

Each variant has a cluster of a chief, three workers and a server on this host. The variants take turns block by block,
so that ratios come from one run; figures are medians over the blocks. All variants train the same models by `model.fit`
on datasets created on the workers (tf_keras: `DatasetCreator`), with the same server processes.

- **Updates per second**: tf_keras under `tf.distribute.ParameterServerStrategy`, which is asynchronous, and
  `Asynchronous` make one update per batch; `Synchronous` makes one per three batches, so compare samples per second.
- **A slow worker**: the dataset of one worker sleeps 100 ms before each of its batches. This differs from a slow
  processor, as the others can use the cores meanwhile.
- **Accuracy** on held-out digits of models that have seen equally many samples.

Writes `parameter_server.json` to `benchmarks/results` and prints a table.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parameter_server_chief import BATCH, MODELS, ROUNDS, WORKERS

_ROOT = Path(__file__).resolve().parents[1]
_CHIEF = Path(__file__).parent / "parameter_server_chief.py"
_FILE = Path(__file__).parent / "results" / "parameter_server.json"
_VARIANTS = ("tf_keras", "asynchronous", "synchronous", "backup worker")
_SLEEP_MICROSECONDS = 100_000
_TURNS = 5
_SLOW_STEPS = {"tf_keras": 300, "asynchronous": 300, "synchronous": 30, "backup worker": 100}
_SEEDS = 3


class Cluster:
    """The processes of a variant."""

    def __init__(self, variant: str, folder: Path, ports: Sequence[int]) -> None:
        """Starts a process for each port; `ready` waits for them."""
        tasks = [("chief", 0), *(("worker", index) for index in range(WORKERS)), ("ps", 0)]
        cluster: dict[str, list[str]] = {}
        for (job, _), port in zip(tasks, ports, strict=True):
            cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
        self.sleeps: list[Path] = []
        self._processes: list[subprocess.Popen[str]] = []
        for job, index in tasks:
            directory = folder / f"{job}-{index}"
            directory.mkdir(parents=True)
            if job != "ps":
                self.sleeps.append(directory / "sleep")
                self.sleeps[-1].write_text("0")
            environment = {
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONPATH": str(_ROOT),
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}),
                "TF_NUM_INTRAOP_THREADS": "1",  # as `tfdist run` gives each of five processes on two cores
            }
            command = [str(_CHIEF), variant] if job == "chief" else ["-m", "tfdist.parameter_server"]
            pipe = subprocess.PIPE if job == "chief" else subprocess.DEVNULL
            log = (folder / f"{job}-{index}.log").open("w")
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=directory,
                    env=environment,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=log,
                    text=True,
                )
            )
        self._log = folder / "chief-0.log"

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the chief and returns its result."""
        stdin = self._processes[0].stdin
        assert stdin is not None
        stdin.write(json.dumps([method, *arguments]) + "\n")
        stdin.flush()
        return json.loads(self._line())

    def ready(self) -> None:
        """Waits until the chief has created its models."""
        self._line()

    def sleep(self, microseconds: int) -> None:
        """Sets how long the last worker sleeps before each batch from now on."""
        temporary = self.sleeps[-1].with_suffix(".new")
        temporary.write_text(str(microseconds))
        temporary.rename(self.sleeps[-1])

    def end(self) -> None:
        """Kills all processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _line(self) -> str:
        stdout = self._processes[0].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"The chief has exited. Its last lines:\n{self._log.read_text()[-3000:]}")
        return line


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def clusters(folder: Path) -> Iterator[dict[str, Cluster]]:
    """Starts a cluster for each variant, and ends them afterwards."""
    started: dict[str, Cluster] = {}
    try:
        # All at once: a port that a cluster does not use yet must not be given to another, as gRPC would share it.
        tasks = WORKERS + 2
        ports = _free_ports(len(_VARIANTS) * tasks)
        for number, variant in enumerate(_VARIANTS):
            own = ports[number * tasks : (number + 1) * tasks]
            started[variant] = Cluster(variant, folder / variant.replace(" ", "-"), own)
        for cluster in started.values():
            cluster.ready()
        yield started
    finally:
        for cluster in started.values():
            cluster.end()


def measure(turns: int) -> dict[str, Any]:
    """Returns the rates by model and variant, the rates with a slow worker, and the accuracies."""
    rates: dict[str, dict[str, list[float]]] = {}
    accuracies: dict[str, list[float]] = {}

    def note(kind: str, variant: str, rate: float) -> None:
        rates.setdefault(kind, {}).setdefault(variant, []).append(rate)

    with tempfile.TemporaryDirectory() as folder, clusters(Path(folder)) as of:
        for turn in range(-1, turns):  # the first turn traces
            for variant, cluster in of.items():
                for model, (_, pushes, rounds) in MODELS.items():
                    steps = rounds if variant in ROUNDS else pushes
                    rate = cluster.call("rate", model, steps)
                    if turn >= 0:
                        note(model, variant, rate)
                if turn >= 0:
                    cluster.sleep(_SLEEP_MICROSECONDS)
                    note("slow worker", variant, cluster.call("rate", "small", _SLOW_STEPS[variant]))
                    cluster.sleep(0)
        for seed in range(_SEEDS):
            for variant, cluster in of.items():
                accuracies.setdefault(variant, []).append(cluster.call("accuracy", seed))
    medians = {kind: {name: statistics.median(v) for name, v in by.items()} for kind, by in rates.items()}
    # Ratios of blocks that were measured directly after each other.
    kept = {
        name: statistics.median(s / e for s, e in zip(rates["slow worker"][name], rates["small"][name], strict=True))
        for name in _VARIANTS
    }
    against = {
        model: {
            name: statistics.median(o / k for o, k in zip(by, rates[model]["tf_keras"], strict=True))
            for name, by in rates[model].items()
        }
        for model in MODELS
    }
    return {
        "updates_per_second": medians,
        "against_tf_keras": against,
        "kept_with_a_slow_worker": kept,
        "accuracy": {name: statistics.mean(values) for name, values in accuracies.items()},
        "blocks": rates,
    }


def main() -> int:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=_TURNS, help="blocks of each kind (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=_FILE, help="where the JSON goes (default: %(default)s)")
    arguments = parser.parse_args()
    found = measure(arguments.turns)
    versions = {"python": platform.python_version(), **{n: version(n) for n in ("tensorflow", "keras", "tf_keras")}}
    result = {
        "versions": versions,
        "workers": WORKERS,
        "servers": 1,
        "batch": BATCH,
        "cores": os.cpu_count(),
        **found,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print("| updates/s (samples/s against tf_keras) | " + " | ".join(_VARIANTS) + " |")
    print("|---|" + "---:|" * len(_VARIANTS))
    for kind, by in found["updates_per_second"].items():
        cells = [f"{by[name]:.0f}" for name in _VARIANTS]
        if kind in MODELS:
            samples = {name: WORKERS if name in ROUNDS else 1 for name in _VARIANTS}
            cells = [
                f"{cell} ({found['against_tf_keras'][kind][name] * samples[name]:.2f})"
                for cell, name in zip(cells, _VARIANTS, strict=True)
            ]
        print(f"| {kind} | " + " | ".join(cells) + " |")
    kept = (f"{found['kept_with_a_slow_worker'][name]:.0%}" for name in _VARIANTS)
    print("| of the even rate with a slow worker | " + " | ".join(kept) + " |")
    print("| held-out accuracy | " + " | ".join(f"{found['accuracy'][name]:.1%}" for name in _VARIANTS) + " |")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
