"""Measures all-reduces between workers of one host: tfdist's exchange, gloo, and TensorFlow's collectives.

    python benchmarks/exchange.py --torch-python /path/to/another/venv/bin/python

Two worker processes for each method, one core for each worker, sum a large and a short vector of float32. The methods
take turns. For each the table has the median time of an all-reduce and the CPU time of a worker, of all its threads:
by the exchange alone (NumPy arrays), and for tensors of a TensorFlow graph; gloo is measured from PyTorch. A graph
also computes the tensor and looks at the sum, which gloo's program does not: "graph alone" does only that, and is
subtracted from the CPU time and the time of the rows of graphs before they are divided by those of gloo. Writes
`benchmarks/results/exchange.json`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

METHODS = ("sockets", "memory", "graph, sockets", "graph, memory", "gloo", "TensorFlow", "graph alone")
_GRAPHS = ("graph, sockets", "graph, memory", "TensorFlow")
_VALUES = {"40 MB": 10_000_000, "4 KB": 1000}
_REPEATS = {"40 MB": 8, "4 KB": 300}
_ROUNDS = 3
_FIRST_PORT = 24_100
_RESULTS = Path(__file__).parent / "results" / "exchange.json"


def main() -> int:
    """Starts the workers of all methods, lets them take turns, and prints and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter with PyTorch; default: this one")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return _serve(arguments.worker, arguments.rank)
    groups = {name: _start(name, arguments.torch_python) for name in arguments.methods}
    try:
        for workers in groups.values():
            for worker in workers:
                _read(worker)  # joined and warm
        measured: dict[str, dict[str, list[Any]]] = {name: {size: [] for size in _VALUES} for name in groups}
        for _ in range(_ROUNDS):
            for name, workers in groups.items():
                for size in _VALUES:
                    for worker in workers:
                        _write(worker, size)
                    measured[name][size] += [_read(worker) for worker in workers]
    finally:
        for workers in groups.values():
            for worker in workers:
                worker.kill()
                worker.wait()
    rows = {
        name: {
            size: {
                "ms": 1e3 * statistics.median(second for one in found for second in one["seconds"]),
                "cpu_ms": 1e3 * statistics.median(one["cpu_seconds"] for one in found),
            }
            for size, found in sizes.items()
        }
        for name, sizes in measured.items()
    }
    _print(rows)
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps({"workers": 2, "rows": rows}, indent=1) + "\n")
    return 0


def _print(rows: dict[str, Any]) -> None:
    print("| method | 40 MB: ms | CPU ms | CPU / gloo | 4 KB: ms | / gloo |")
    print("|---|---:|---:|---:|---:|---:|")
    gloo = rows.get("gloo")
    for name, row in rows.items():
        large, short = row["40 MB"], row["4 KB"]
        ratios = ["", ""]
        if gloo is not None:
            alone = rows.get("graph alone") if name in _GRAPHS else None
            cpu_ms, ms = large["cpu_ms"], short["ms"]
            if alone is not None:
                cpu_ms, ms = cpu_ms - alone["40 MB"]["cpu_ms"], ms - alone["4 KB"]["ms"]
            ratios = [f"{cpu_ms / gloo['40 MB']['cpu_ms']:.2f}", f"{ms / gloo['4 KB']['ms']:.2f}"]
        print(f"| {name} | {large['ms']:.1f} | {large['cpu_ms']:.1f} | {ratios[0]} | {short['ms']:.3f} | {ratios[1]} |")


def _start(name: str, torch_python: str) -> list[Any]:
    python = torch_python if name == "gloo" else sys.executable
    port = _FIRST_PORT + 10 * METHODS.index(name)
    workers = [{"worker": [f"127.0.0.1:{port + rank}" for rank in range(2)]}] * 2
    return [
        subprocess.Popen(
            [python, __file__, "--worker", name, "--rank", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port + 5),
            },
        )
        for rank, cluster in enumerate(workers)
    ]


def _write(worker: Any, message: Any) -> None:
    worker.stdin.write(json.dumps(message) + "\n")
    worker.stdin.flush()


def _read(worker: Any) -> Any:
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"A worker has ended: {worker.args}")
    return json.loads(line)


# In a worker's process.


def _serve(method: str, rank: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    calls = {size: _all_reduce(method, rank, count) for size, count in _VALUES.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        size = json.loads(line)
        seconds, cpu = [], time.process_time()
        for _ in range(_REPEATS[size]):
            began = time.perf_counter()
            calls[size]()
            seconds.append(time.perf_counter() - began)
        cpu_seconds = (time.process_time() - cpu) / _REPEATS[size]
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)
    return 0


_made: dict[str, Any] = {}


def _all_reduce(method: str, rank: int, count: int) -> Callable[[], Any]:
    if method == "gloo":
        return _gloo(rank, count)
    if method == "TensorFlow":
        return _tensorflow(count)
    return _exchange(method, rank, count)


def _exchange(method: str, rank: int, count: int) -> Callable[[], Any]:
    import numpy as np

    from tfdist.exchange.worker_exchange import STEPS, Exchange

    if method != "graph alone" and "exchange" not in _made:
        addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        _made["exchange"] = Exchange(rank, addresses, token="benchmark", shares_memory="memory" in method)
    if not method.startswith("graph"):
        values = np.ones(count, np.float32)
        return lambda: _made["exchange"].channel(STEPS).all_reduce(values)
    import tensorflow as tf

    from tfdist.collectives.exchange_boundary import ExchangeBoundary

    if method != "graph alone" and "boundary" not in _made:
        _made["boundary"] = ExchangeBoundary(_made["exchange"])
    variable = tf.Variable(tf.ones([count]))
    summed = (lambda tensor: tensor) if method == "graph alone" else _made["boundary"].all_reduce
    step = tf.function(lambda: tf.reduce_max(summed(variable + 1.0)), autograph=False)
    return lambda: step().numpy()


def _gloo(rank: int, count: int) -> Callable[[], Any]:
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    values = torch.zeros(count)
    return lambda: torch.distributed.all_reduce(values)


def _tensorflow(count: int) -> Callable[[], Any]:
    import tensorflow as tf

    if "strategy" not in _made:
        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        _made["strategy"] = tf.distribute.MultiWorkerMirroredStrategy()
    strategy = _made["strategy"]
    variable = tf.Variable(tf.ones([count]))

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        return tf.reduce_max(context.all_reduce(tf.distribute.ReduceOp.SUM, variable + 1.0))

    step = tf.function(lambda: strategy.run(replica), autograph=False)
    return lambda: strategy.experimental_local_results(step())[0].numpy()


if __name__ == "__main__":
    sys.exit(main())
