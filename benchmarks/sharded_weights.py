"""Peak memory, bytes and time of a step with whole weights, sharded slots, and weights in parts.

    python benchmarks/sharded_weights.py [--workers 2] [--width 2048] [--layers 12] [--rounds 1]

Each variant trains an MLP with Adam on workers of this host, in turn. Memory is the largest of a worker beyond what it
had after training a tiny model; glibc gives blocks of more than 1 MB back at once (MALLOC_MMAP_THRESHOLD_), without
which the peaks of all variants are higher. Prints a table of medians; times are ratios to whole weights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIANTS = {"whole": {}, "sharded slots": {"shard_optimizer_state": True}, "sharded weights": {"shard_weights": True}}
_STEPS = 4  # of an epoch


def main() -> None:
    """Measures the variants, or trains as a worker of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="rows of each worker")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--worker", metavar="VARIANT", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return _train(arguments)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        for name in VARIANTS:
            seen[name] += _run(arguments, name)
    whole_seconds = statistics.median(one["seconds"] for one in seen["whole"])
    print("| | peak of a worker, MB | sent in a step, MB | step / whole |\n|---|---|---|---|")
    for name, results in seen.items():
        peak = max(one["peak_mb"] for one in results)
        sent, seconds = (statistics.median(one[key] for one in results) for key in ("sent_mb", "seconds"))
        print(f"| {name} | {peak:.0f} | {sent:.1f} | {seconds / whole_seconds:.2f} |")
    return None


def _run(arguments: argparse.Namespace, name: str) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        numbers = ("workers", "width", "layers", "batch")
        options = [text for key in numbers for text in (f"--{key}", str(getattr(arguments, key)))]
        script = [__file__, *options, "--worker", name, "--results", folder]
        command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(arguments.workers), *script]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return [json.loads(path.read_text()) for path in Path(folder).iterdir()]


def _train(arguments: argparse.Namespace) -> None:
    import keras
    import numpy as np

    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy(**VARIANTS[arguments.worker])
    batch = arguments.batch * strategy.num_workers
    inputs = np.random.default_rng(0).normal(size=(batch * _STEPS, arguments.width)).astype("float32")

    def fit(width: int, layers: int, epochs: int) -> dict[str, float]:
        with strategy.scope():
            keras.utils.set_random_seed(0)
            hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(layers)]
            model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(8)])
            model.compile(keras.optimizers.Adam(1e-4), loss="mse", jit_compile=False)
        seconds, sent = [], 0.0
        for _ in range(epochs):
            before, begun = strategy.communication.wire_bytes, time.perf_counter()
            model.fit(inputs[:, :width], inputs[:, :8], batch, shuffle=False, verbose=0)
            seconds.append((time.perf_counter() - begun) / _STEPS)
            sent = (strategy.communication.wire_bytes - before) / _STEPS / 1e6
        return {"seconds": statistics.median(seconds[1:] or seconds), "sent_mb": sent}

    fit(16, 1, 1)
    before = _memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    result = fit(arguments.width, arguments.layers, 4)
    result["peak_mb"] = _memory_mb("VmHWM") - before
    (arguments.results / f"{strategy.rank}.json").write_text(json.dumps(result))


def _memory_mb(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) / 1024


if __name__ == "__main__":
    main()
