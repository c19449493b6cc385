"""Measures the memory of a model-parallel training over several processes, phase by phase.

    python benchmarks/model_parallel_memory.py [--ways 2]

A model of 200 MB with Adam is trained in 4 stages, each on the device of another process (a worker), by a chief that
holds none of it; with `--ways 2` in 2 stages whose variables are split over 2 workers each. It is built, trained, saved
by `FailureRecovery` in the background, saved by Keras and by TensorFlow, and resumed by new processes. The peak of the
resident memory (`VmHWM`, reset before each phase) of the chief and of the largest worker is compared with an empty
program: a chief and workers that import TensorFlow, Keras and tfdist and connect.

Writes `model_parallel_memory.json`, or `model_parallel_memory_2_ways.json`, to `benchmarks/results` and prints a table.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent / "results"
_WORKERS, _LAYERS, _UNITS, _BATCH = 4, 12, 2048, 16
_STEPS, _EVERY = 12, 4
_MB = 1e6


def peak_mb(pid: int) -> float:
    """Returns the peak of the resident memory of a process since the last `reset_peak`, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / _MB


def reset_peak(pid: int) -> None:
    """Sets the peak of a process to its present resident memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Phases:
    """The peaks of the chief and of its workers in each phase."""

    def __init__(self, workers: list[int]) -> None:
        self.peaks: dict[str, dict[str, float]] = {}
        self._workers = workers

    def end(self, name: str) -> None:
        """Ends a phase and begins the next one."""
        workers = [peak_mb(pid) for pid in self._workers]
        self.peaks[name] = {"chief_mb": peak_mb(os.getpid()), "worker_mb": max(workers)}
        for pid in (os.getpid(), *self._workers):
            reset_peak(pid)


def serve(spec: dict[str, list[str]], task: int) -> None:
    """Runs a worker until it is killed."""
    import keras
    import tensorflow as tf

    import tfdist.strategies

    del keras, tfdist
    threads = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    tf.distribute.Server(spec, job_name="worker", task_index=task, config=threads).join()


def run_chief(spec: dict[str, list[str]], workers: list[int], folder: Path, run: str, ways: int) -> dict[str, Any]:
    """Returns the peaks of the phases of one run: "empty", "train" or "resume"."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import ModelParallelStrategy, Pipeline

    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(spec), job_name="chief", task_index=0)
    devices = [f"/job:worker/task:{index}/device:CPU:0" for index in range(_WORKERS)]
    for device in devices:
        with tf.device(device):
            tf.reduce_sum(tf.ones([4])).numpy()
    phases = Phases(workers)
    phases.end("empty")
    if run == "empty":
        return phases.peaks
    keras.utils.set_random_seed(0)
    mesh = keras.distribution.DeviceMesh((1, ways), ["batch", "model"], devices=[str(rank) for rank in range(ways)])
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*columns.*/kernel"], layout[".*rows.*/kernel"] = (None, "model"), ("model", None)
    pipeline = Pipeline(stages=_WORKERS // ways, micro_batches=4)
    with ModelParallelStrategy(devices, pipeline=pipeline, layout_map=layout if ways > 1 else None).scope():
        names = [f"{'rows' if index % 2 else 'columns'}_{index}" for index in range(_LAYERS)]
        layers = [keras.layers.Dense(_UNITS, "relu", use_bias=False, name=name) for name in names]
        model = keras.Sequential([keras.Input((_UNITS,)), *layers])
        model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
    phases.end("build")
    x = np.random.default_rng(0).normal(size=(_STEPS * _BATCH, _UNITS)).astype("float32")
    recovery = FailureRecovery(folder / "checkpoints", every_steps=_EVERY)
    options: dict[str, Any] = {"batch_size": _BATCH, "shuffle": False, "verbose": 0}
    if run == "resume":
        model.fit(x, x, epochs=2, callbacks=[recovery], **options)
        phases.end("restore, steps and saves")
        return phases.peaks
    model.fit(x[: 4 * _BATCH], x[: 4 * _BATCH], **options)
    phases.end("steps")
    model.fit(x, x, callbacks=[recovery], **options)
    phases.end("steps with saves by FailureRecovery")
    model.save_weights(folder / "model.weights.h5")
    phases.end("model.save_weights")
    model.save(folder / "model.keras")
    phases.end("model.save")
    tf.train.Checkpoint(model=model).write(str(folder / "checkpoint"))
    phases.end("tf.train.Checkpoint.write")
    return phases.peaks


def start(run: str, folder: Path, ways: int) -> dict[str, Any]:
    """Runs a chief with its workers, in new processes, and returns the chief's result."""
    addresses = [f"127.0.0.1:{_free_port()}" for _ in range(_WORKERS + 1)]
    spec = json.dumps({"worker": addresses[1:], "chief": addresses[:1]})
    command = [sys.executable, __file__, "--spec", spec, "--folder", str(folder), "--ways", str(ways)]
    environment = {"MALLOC_ARENA_MAX": "1", **os.environ}  # as `tfdist run --chief` sets it
    workers = [subprocess.Popen([*command, "--task", str(index)], env=environment) for index in range(_WORKERS)]
    try:
        pids = json.dumps([worker.pid for worker in workers])
        run_of_chief = [*command, "--run", run, "--pids", pids]
        done = subprocess.run(run_of_chief, env=environment, stdout=subprocess.PIPE, check=True, timeout=600)
        return dict(json.loads(done.stdout.splitlines()[-1]))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    """Measures all runs, or is a process of one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--spec", "--folder", "--task", "--run", "--pids"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--ways", type=int, default=1, help="over how many workers variables are split")
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if options.task is not None:
        return serve(json.loads(options.spec), int(options.task))
    if options.run is not None:
        processes = json.loads(options.spec), json.loads(options.pids)
        peaks = run_chief(*processes, Path(options.folder), options.run, options.ways)
        return print(json.dumps(peaks), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = {run: start(run, Path(folder), options.ways) for run in ("empty", "train", "resume")}
    empty = found.pop("empty")["empty"]
    weights_mb = _LAYERS * _UNITS**2 * 4 / _MB
    rows = {phase: peaks for phases in found.values() for phase, peaks in phases.items() if phase != "empty"}
    print(f"{weights_mb:.0f} MB of weights, {_WORKERS} workers; above an empty program, in MB:")
    for phase, peaks in rows.items():
        print(f"{phase:40}chief {peaks['chief_mb'] - empty['chief_mb']:6.0f}", end="")
        print(f"  largest worker {peaks['worker_mb'] - empty['worker_mb']:6.0f}")
    option = f" --ways {options.ways}" if options.ways > 1 else ""
    result = {
        "weights_mb": weights_mb,
        "workers": _WORKERS,
        "empty": empty,
        "phases": rows,
        "versions": {name: version(name) for name in ("tensorflow", "keras")} | {"python": platform.python_version()},
        "command": "python benchmarks/model_parallel_memory.py"
        + (f" --ways {options.ways}" if options.ways > 1 else ""),
    }
    name = "model_parallel_memory" + (f"_{options.ways}_ways" if options.ways > 1 else "")
    (_RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
