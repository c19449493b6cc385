"""Measures what the exchange adds to `fit` of a tiny model: one process and two workers, a core each, in turns.

    python benchmarks/tiny_model.py                          steps, threads, start: about three minutes
    python benchmarks/tiny_model.py --memory-steps 100000    the growth of memory too: about ten minutes more

The model has 20,000 parameters; a global batch has 32 samples. Programs: plain; and three that keep Python busy
for about 50 ms a step: a callback, a generator of batches, and a thread beside `fit` (with a larger model).
Writes `benchmarks/results/tiny_model.json`, and prints a table of medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("plain", "callback", "generator", "thread")
_STEPS = {"plain": 400, "callback": 100, "generator": 100, "thread": 100}
_KINDS = {"one process": 1, "two workers": 2}
_BATCH_SIZE, _FEATURES = 32, 64
_HIDDEN = {"thread": 6000}
_EPOCH_STEPS = 2000  # the data of longer trainings would be counted as their memory
_SHORTEST_GROWTH_STEPS = 40_000  # a process reaches its size in the first 10,000
_FIRST_PORT = 24_300
_RESULTS = Path(__file__).parent / "results" / "tiny_model.json"


def main() -> int:
    """Starts the processes, lets them take turns, and prints and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory-steps", type=int, default=0, help="for the growth of memory")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return _serve(arguments.rank)
    if 0 < arguments.memory_steps < _SHORTEST_GROWTH_STEPS:
        parser.error(f"--memory-steps: {_SHORTEST_GROWTH_STEPS} at least")
    kinds = {kind: _start(kind, size) for kind, size in _KINDS.items()}
    try:
        started = {kind: [_read(worker) for worker in workers] for kind, workers in kinds.items()}
        rows: dict[str, Any] = {kind: {"first_step_seconds": max(found)} for kind, found in started.items()}
        for program in arguments.programs:
            measured: dict[str, list[Any]] = {kind: [] for kind in kinds}
            for turn in range(arguments.rounds + 1):
                for kind, workers in kinds.items():
                    found = _measured(workers, program, _STEPS[program])
                    measured[kind] += found if turn else []  # the first turn traces
                    rows[kind]["threads"] = max(one["threads"] for one in found)
            for kind, turns in measured.items():
                rows[kind][f"{program}_ms"] = 1e3 * statistics.median(one["seconds"] for one in turns)
                rows[kind][f"{program}_cpu_ms"] = 1e3 * statistics.median(one["cpu_seconds"] for one in turns)
        for kind, workers in kinds.items() if arguments.memory_steps else ():
            found = _measured(workers, "plain", arguments.memory_steps)
            rows[kind]["bytes_a_step"] = max(_growth(one["bytes"]) for one in found)
    finally:
        for worker in [one for workers in kinds.values() for one in workers]:
            worker.kill()
            worker.wait()
    _print(rows)
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps({"memory_steps": arguments.memory_steps, "rows": rows}, indent=1) + "\n")
    return 0


def _growth(resident: list[int]) -> float:
    """Returns the bytes a step by which a process grows, from its bytes after each epoch.

    The first quarter is left out: threads start, and what the C library keeps for later reaches its size.
    """
    later = resident[len(resident) // 4 :]
    return statistics.linear_regression(range(len(later)), later).slope / _EPOCH_STEPS


def _print(rows: dict[str, Any]) -> None:
    print("| | one process | two workers | ratio |\n|---|---:|---:|---:|")
    one, two = rows.values()
    for name in two:
        print(f"| {name.replace('_', ' ')} | {one[name]:.2f} | {two[name]:.2f} | {two[name] / one[name]:.2f} |")


def _start(kind: str, size: int) -> list[Any]:
    addresses = [f"127.0.0.1:{_FIRST_PORT + rank}" for rank in range(size)]
    tasks = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}} for rank in range(size)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TFDIST_TOKEN": "benchmark"}
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "TF_CONFIG": json.dumps(task)} if size > 1 else environment,
        )
        for rank, task in enumerate(tasks)
    ]


def _measured(workers: list[Any], program: str, steps: int) -> list[dict[str, float]]:
    for worker in workers:
        worker.stdin.write(json.dumps([program, steps]) + "\n")
        worker.stdin.flush()
    return [_read(worker) for worker in workers]


def _read(worker: Any) -> Any:
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"A worker has ended: {worker.args}")
    return json.loads(line)


# In a worker's process.


def _serve(rank: int) -> int:
    began = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import keras

    strategy = None
    if "TF_CONFIG" in os.environ:
        from tfdist.strategies import MultiWorkerMirroredStrategy

        strategy = MultiWorkerMirroredStrategy()
    models: dict[int, Any] = {}
    fits = {program: _fit(strategy, models, program) for program in PROGRAMS}
    fits["plain"](1)
    print(json.dumps(time.monotonic() - began), flush=True)
    for line in sys.stdin:
        program, steps = json.loads(line)
        print(json.dumps({**fits[program](steps), "threads": int(_status()["Threads"])}), flush=True)
    keras.backend.clear_session()
    return 0


def _status() -> dict[str, str]:
    return dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())


def _fit(strategy: Any, models: dict[int, Any], program: str) -> Callable[[int], dict[str, Any]]:
    """Returns a function that trains for some steps.

    It returns the time and CPU time of a step of the last epoch, and the resident bytes after each epoch.
    """
    import contextlib

    import keras
    import numpy as np

    class Clock(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.bytes: list[int] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.began, self.cpu_began = time.perf_counter(), time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds = time.perf_counter() - self.began
            self.cpu_seconds = time.process_time() - self.cpu_began
            self.bytes.append(1024 * int(_status()["VmRSS"].split()[0]))

    class Busy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            _work()

    hidden = _HIDDEN.get(program, 300)
    inputs = np.random.default_rng(0).normal(size=(_BATCH_SIZE, _FEATURES)).astype("float32")

    def batches(steps: int) -> Iterator[Any]:
        for _ in range(steps):
            if program == "generator":
                _work()
            yield inputs, inputs[:, :1]

    def fit(all_steps: int) -> dict[str, Any]:
        steps, epochs = min(all_steps, _EPOCH_STEPS), max(all_steps // _EPOCH_STEPS, 1)
        if hidden not in models:
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                layers = [keras.Input((_FEATURES,)), keras.layers.Dense(hidden, "tanh"), keras.layers.Dense(1)]
                models[hidden] = keras.Sequential(layers)
                models[hidden].compile(keras.optimizers.Adam(1e-3), loss="mse", metrics=["mae"])
        clock, ended = Clock(), threading.Event()
        others = [Busy()] if program == "callback" else []
        if program == "thread":
            threading.Thread(target=lambda: [_work() for _ in iter(ended.is_set, True)], daemon=True).start()
        data = batches(steps) if program == "generator" else np.tile(inputs, (steps, 1))
        options = {} if program == "generator" else {"y": data[:, :1], "batch_size": _BATCH_SIZE}
        models[hidden].fit(data, epochs=epochs, verbose=0, shuffle=False, callbacks=[clock, *others], **options)
        ended.set()
        times = {"seconds": clock.seconds / steps, "cpu_seconds": clock.cpu_seconds / steps}
        return {**times, "bytes": clock.bytes}

    return fit


def _work() -> None:
    total = 0
    for value in range(1_000_000):
        total += value


if __name__ == "__main__":
    sys.exit(main())
