"""Trains over links of 10 and 2 Mbit/s that transfers saturate for minutes, and lose packets.

    python benchmarks/slow_links.py [--seconds 600] [--rates 10 2] [--cases NAME ...]

Two network namespaces are joined by links with a small queue (`tc tbf`), so that TCP loses about a packet in a hundred;
the loss is measured. Data parallelism exchanges the dense gradients of 10 M parameters over it; a parameter server and
the second stage of a pipeline are on the other side. All cases run at the same time, each over separate links: the
processes wait for the links. `TFDIST_SILENCE_LIMIT` in the environment applies. Needs root on Linux, `ip` and `tc`.
Writes `benchmarks/results/slow_links.json`.
"""

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from network_run.links import INTERFACE, Network, burst_bytes

_RESULTS = Path(__file__).parent / "results"
_QUEUE_BYTES = 24_000
_START_SECONDS = 240.0
_LIMIT_FACTOR, _LIMIT_SECONDS = 3.0, 300.0

# By case: samples of a batch, and how often the bytes of the model's variables, or of the activations, pass the link.
CASES = {
    "MultiWorkerMirroredStrategy": (64, 1.0),
    "MultiWorkerMirroredStrategy without tfdist run": (64, 1.0),
    "ParameterServerStrategy": (64, 2.0),
    "ModelParallelStrategy": (2048, 2.0),
}
_PARAMETER_BYTES, _ACTIVATION_BYTES = 40e6, 2048 * 4.0


def main() -> int:
    """Measures the cases and writes the results."""
    arguments = _arguments()
    if arguments.train:
        train(arguments.train, arguments.steps, arguments.output)
        return 0
    if arguments.case:
        arguments.output.write_text(json.dumps(measure(arguments.case, arguments.rates[0], arguments.seconds)))
        return 0
    results: dict[str, Any] = {"seconds": arguments.seconds, "parameters": 10_000_000, "runs": []}
    with tempfile.TemporaryDirectory() as folder:
        for rate in arguments.rates:
            running = []
            for number, case in enumerate(arguments.cases):
                path = Path(folder, f"{rate}-{number}.json")
                options = ["--case", case, "--rates", str(rate), "--seconds", str(arguments.seconds)]
                running.append((case, path, subprocess.Popen([sys.executable, __file__, *options, "--output", path])))
            for case, path, process in running:
                process.wait()
                found = json.loads(path.read_text()) if path.exists() else {"error": f"exit code {process.returncode}"}
                results["runs"].append({"case": case, "mbit_per_second": rate, **found})
                print(json.dumps(results["runs"][-1]), flush=True)
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure(case: str, rate: float, seconds: float) -> dict[str, Any]:
    """Trains one case over its own links for about `seconds`.

    Returns:
        The numbers of the steps' ends in seconds after the first one's begin, and the packets that were lost.
    """
    batch, passes = CASES[case]
    size = batch * _ACTIVATION_BYTES if case == "ModelParallelStrategy" else _PARAMETER_BYTES
    step_seconds = passes * size * 8 / (rate * 1e6)
    steps = max(2, math.ceil(seconds / step_seconds))
    with tempfile.TemporaryDirectory() as folder, Network(2) as network:
        output = Path(folder, "steps.json")
        with _started(case, steps, output, network, Path(folder)) as processes:
            limit = time.monotonic() + _START_SECONDS + _LIMIT_FACTOR * steps * step_seconds + _LIMIT_SECONDS
            ready = output.with_suffix(".ready")
            while not ready.exists() and time.monotonic() < limit and processes[0].poll() is None:
                time.sleep(0.2)
            _shape(network, rate)
            while processes[0].poll() is None and time.monotonic() < limit:
                time.sleep(0.2)
            code = processes[0].poll()
            lost = _loss(network)
        ends = json.loads(output.read_text()) if output.exists() else []
        messages = [line for name in ("0.txt", "1.txt") for line in _why(Path(folder, name))]
    return {
        "steps": len(ends),
        "steps_asked": steps,
        "exit_code": code,
        "seconds_by_step": [round(end - before, 1) for before, end in zip([0.0, *ends], ends, strict=False)],
        "link_seconds_by_step": round(step_seconds, 1),
        "lost_packets": lost,
        **({} if code == 0 else {"error": messages[:2]}),
    }


def train(case: str, steps: int, path: Path) -> None:
    """Trains in this process; on the chief writes when each step has ended."""
    import keras
    import numpy as np
    from workloads import WORKLOADS

    from tfdist import strategies

    kind = case.partition(" ")[0]
    options: dict[str, Any] = {}
    if kind == "ParameterServerStrategy":
        options = {"mode": strategies.Synchronous()}
    elif kind == "ModelParallelStrategy":
        options = {"pipeline": strategies.Pipeline(stages=2, micro_batches=1)}
    strategy = getattr(strategies, kind)(**options)
    rows = CASES[case][0]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = WORKLOADS["mlp"].build()
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(rows, 784)).astype("float32"), rng.integers(0, 10, rows)
    ends: list[float] = []

    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            ends.append(time.monotonic() - began)
            if strategy.rank == 0:
                path.write_text(json.dumps(ends))

    data = {"x": inputs, "y": labels, "batch_size": rows, "shuffle": False, "verbose": 0}
    model.fit(**data)  # traced, over links without a limit
    model.evaluate(inputs[:2], labels[:2], verbose=0)
    path.with_suffix(".ready").touch()
    time.sleep(2.0)
    began = time.monotonic()
    model.fit(**data, epochs=steps, callbacks=[Ends()])


@contextlib.contextmanager
def _started(case: str, steps: int, output: Path, network: Network, folder: Path) -> Iterator[list[Any]]:
    """Starts the processes of a case; the first one's exit code is that of the training."""
    here, there = network.addresses
    script = [__file__, "--train", case, "--steps", str(steps), "--output", str(output)]
    python = [sys.executable, "-u"]
    launched = "tfdist run" not in case
    commands: list[tuple[int, list[str], dict[str, str]]] = []
    if case.startswith("MultiWorker") and launched:
        token = {"TFDIST_TOKEN": "benchmark-of-slow-links"}
        run = [*python, "-m", "tfdist.launch", "run", "--nodes", "2", "--rendezvous", f"{here}:29400", "--workers", "1"]
        for rank, address in enumerate(network.addresses):
            commands.append((rank, [*run, "--node-rank", str(rank), "--address", address, *script], token))
    else:
        cluster: dict[str, list[str]]
        if case.startswith("MultiWorker"):
            cluster = {"worker": [f"{here}:2222", f"{there}:2222"]}
            tasks = [("worker", 0, 0), ("worker", 1, 1)]
        elif case.startswith("Parameter"):
            cluster = {"chief": [f"{here}:2222"], "ps": [f"{here}:2223"], "worker": [f"{there}:2222"]}
            tasks = [("chief", 0, 0), ("ps", 0, 0), ("worker", 0, 1)]
        else:
            cluster = {"chief": [f"{here}:2222"], "worker": [f"{here}:2223", f"{there}:2222"]}
            tasks = [("chief", 0, 0), ("worker", 0, 0), ("worker", 1, 1)]
        for job, index, side in tasks:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            serves = job == "ps" or "chief" in cluster and job == "worker"
            program = [*python, "-m", "tfdist.servers"] if serves else [*python, *script]
            commands.append((side, program, {"TF_CONFIG": config}))
    processes = []
    root = Path(__file__).resolve().parent.parent
    try:
        for number, (side, command, added) in enumerate(commands):
            environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'benchmarks'}", "TF_CPP_MIN_LOG_LEVEL": "2"}
            environment |= {"CUDA_VISIBLE_DEVICES": "-1", **added}
            with open(folder / f"{number}.txt", "w") as log:
                whole = [*network.command(side), *command]
                processes.append(subprocess.Popen(whole, env=environment, stdout=log, stderr=log, cwd=root))
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()


def _shape(network: Network, rate: float) -> None:
    """Limits the rate behind the network cards of the hosts, with queues that are too small for TCP's bursts.

    A queue on a host's own card would hold its connections back before anything is lost.
    """
    bits = round(rate * 1e6)
    network.shape(bits)  # connections send segments for this rate
    for namespace in network.namespaces:
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", INTERFACE, "root"], check=True)
    for where, device in _queues(network):
        bucket = ["tbf", "rate", f"{bits}bit", "burst", f"{burst_bytes(bits)}b", "limit", f"{_QUEUE_BYTES}b"]
        subprocess.run(["tc", "-n", where, "qdisc", "replace", "dev", device, "root", *bucket], check=True)


def _loss(network: Network) -> float:
    """Returns the fraction of the packets that the queues of the links have dropped."""
    sent = dropped = 0
    for where, device in _queues(network):
        shown = subprocess.run(
            ["tc", "-s", "-n", where, "qdisc", "show", "dev", device], capture_output=True, text=True
        )
        if found := re.search(r"(\d+) pkt \(dropped (\d+),", shown.stdout):
            sent, dropped = sent + int(found[1]), dropped + int(found[2])
    return round(dropped / max(1, sent + dropped), 4)


def _queues(network: Network) -> list[tuple[str, str]]:
    return [(network._hub, f"port{rank}") for rank in range(len(network.namespaces))]


def _why(log: Path) -> list[str]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [line[:300] for line in lines if re.search(r"Error|error|failed|lost", line)][-1:]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of steps on each link; default: 600")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 2.0], help="Mbit/s; default: 10 2")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all")
    parser.add_argument("--output", type=Path, default=_RESULTS / "slow_links.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
