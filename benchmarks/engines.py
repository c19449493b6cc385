"""Compares `on_ray`, `on_spark` and `on_dask` with `tfdist run`: the start, the weights, a killed worker, what is left.

    python benchmarks/engines.py
    python benchmarks/engines.py --engines dask --rounds 1

Two workers train a small classifier with `FailureRecovery`. The engines are local, and started before anything is
timed: Ray with two cores, Spark as `local-cluster[2,1,1024]`, Dask's `LocalCluster` of two processes.

- **The start**: seconds from the call to the end of the first training step on worker 0, as a ratio to that of
  `tfdist run --workers 2`. The engines and `tfdist run` take turns; medians.
- **The weights** after the training, against those of `tfdist run`: the largest difference.
- **A killed worker**: worker 1 gets SIGKILL in the middle, once. The largest difference of the weights again.
- **What is left** after each call: processes and temporary files of tfdist.

Writes `engines.json` to `benchmarks/results` and prints a table.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

_FILE = Path(__file__).parent / "results" / "engines.json"
_WORKERS, _STEPS, _KILLED_AFTER = 2, 24, 13
_REFERENCE = "tfdist run"


def train(directory: str, is_killed: bool) -> tuple[float, list[Any]]:
    """Trains on this worker; returns when its first step ended, as Unix time, and the weights."""
    import os
    import signal
    import time
    from pathlib import Path
    from typing import Any

    import keras
    import numpy as np

    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import MultiWorkerMirroredStrategy

    class Clock(keras.callbacks.Callback):
        is_stateless = True
        first_step_at = 0.0
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.first_step_at = self.first_step_at or time.time()
            self.steps += 1
            killed = Path(directory) / "killed"
            if is_killed and strategy.rank == 1 and self.steps == _KILLED_AFTER and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    inputs, labels = rng.normal(size=(32 * _STEPS // 2, 64)).astype("float32"), rng.integers(0, 10, 32 * _STEPS // 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
        model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    clock = Clock()
    recovery = FailureRecovery(Path(directory) / "checkpoints", every_steps=4)
    model.fit(inputs, labels, batch_size=32, epochs=2, verbose=0, callbacks=[clock, recovery])
    return clock.first_step_at, model.get_weights()


_Call = Callable[[str, bool], list[tuple[float, list[Any]]]]


def _run_command(directory: str, is_killed: bool) -> list[tuple[float, list[Any]]]:
    command = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(_WORKERS), "--max-restarts", "1"]
    command += [__file__, "--worker", directory, *(["--killed"] if is_killed else [])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results = []
    for rank in range(_WORKERS):
        with np.load(Path(directory) / f"{rank}.npz") as file:
            results.append((float(file["at"]), [file[f"weight-{index}"] for index in range(len(file.files) - 1)]))
    return results


def _write_result(directory: str, is_killed: bool) -> None:
    from tfdist import cluster

    at, weights = train(directory, is_killed)
    config = cluster.detect()
    rank = 0 if config is None else config.task.index
    arrays = {f"weight-{index}": weight for index, weight in enumerate(weights)}
    np.savez(Path(directory) / f"{rank}.npz", at=at, **arrays)


@contextlib.contextmanager
def _ray() -> Iterator[_Call]:
    import ray

    from tfdist.launch import on_ray

    ray.init(num_cpus=_WORKERS, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    try:
        yield functools.partial(on_ray, train, workers=_WORKERS, max_restarts=1)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _spark() -> Iterator[_Call]:
    from pyspark.sql import SparkSession

    from tfdist.launch import on_spark

    os.environ["PYSPARK_PYTHON"] = sys.executable  # of the executors
    builder = SparkSession.builder.master(f"local-cluster[{_WORKERS},1,1024]").appName("engines")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    try:
        yield functools.partial(on_spark, train, workers=_WORKERS, max_restarts=1)
    finally:
        session.stop()


@contextlib.contextmanager
def _dask() -> Iterator[_Call]:
    from distributed import Client, LocalCluster

    from tfdist.launch import on_dask

    with (
        LocalCluster(n_workers=_WORKERS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield functools.partial(on_dask, train, client=client, workers=_WORKERS, max_restarts=1)


_ENGINES = {"ray": _ray, "spark": _spark, "dask": _dask}


def left_behind() -> list[str]:
    """Returns the processes and temporary files of calls that are still there."""
    places = str(Path(tempfile.gettempdir()) / "tfdist-place-")
    found = [path.name for path in Path(tempfile.gettempdir()).glob("tfdist-place-*")]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if places.encode() in (process / "cmdline").read_bytes():
                found.append(f"process {process.name}")
    return found


def _largest_difference(results: list[tuple[float, list[Any]]], reference: list[Any]) -> float:
    return max(
        float(np.abs(weight - other).max())
        for _, weights in results
        for weight, other in zip(weights, reference, strict=True)
    )


def measure(calls: dict[str, _Call], rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the results of each engine, and of `tfdist run`."""
    starts: dict[str, list[float]] = {name: [] for name in calls}
    found: dict[str, dict[str, Any]] = {name: {"difference": 0.0, "left": []} for name in calls}
    reference: list[Any] = []
    for turn in range(rounds + 1):
        is_killed = turn == rounds
        for name, call in calls.items():
            with tempfile.TemporaryDirectory() as directory:
                began = time.time()
                results = call(directory, is_killed)
                reference = reference or results[0][1]
                difference = _largest_difference(results, reference)
                if is_killed:
                    found[name]["difference_killed"] = difference
                else:
                    starts[name].append(results[0][0] - began)
                    found[name]["difference"] = max(found[name]["difference"], difference)
                found[name]["left"] += left_behind()
    for name, seconds in starts.items():
        found[name]["start_seconds"] = statistics.median(seconds)
        found[name]["start_ratio"] = statistics.median(a / b for a, b in zip(seconds, starts[_REFERENCE], strict=True))
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(_ENGINES), help="some of %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=_FILE)
    parser.add_argument("--worker", metavar="DIRECTORY", help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        _write_result(options.worker, options.killed)
        return
    names = options.engines.split(",")
    with contextlib.ExitStack() as engines:
        # Temporary files of this benchmark alone.
        os.environ["TMPDIR"] = tempfile.tempdir = engines.enter_context(tempfile.TemporaryDirectory())
        calls: dict[str, _Call] = {_REFERENCE: _run_command}
        calls |= {name: engines.enter_context(_ENGINES[name]()) for name in names}
        results = measure(calls, options.rounds)
    packages = {name: version({"dask": "distributed", "spark": "pyspark"}.get(name, name)) for name in names}
    packages |= {name: version(name) for name in ("tensorflow", "keras")}
    report = {"rounds": options.rounds, "python": platform.python_version(), "packages": packages, "results": results}
    options.results.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'':10} {'start':>7} {'ratio':>6} {'weights':>9} {'killed':>9}  left")
    for name, of in results.items():
        row = f"{name:10} {of['start_seconds']:5.1f} s {of['start_ratio']:6.2f} {of['difference']:9.1e}"
        print(f"{row} {of['difference_killed']:9.1e}  {', '.join(of['left']) or 'nothing'}")


if __name__ == "__main__":
    main()
