"""Measures the cost of recovery: a save, a training with saves, and a restart.

    python benchmarks/recovery_cost.py
    python benchmarks/recovery_cost.py --overhead-of "8 MB"    # a part of it; the other results in the file stay
    python benchmarks/recovery_cost.py --memory                # what concerns memory; likewise

- **A save** of a model of 50 MB (with Adam's state): how much longer a step is than in a training that does not save,
  and how much longer it would be if the write, with checksums and flush to disk, were not in the background; also of a
  save to the memory of the host.
- **A restore** of 200 MB in one process, from memory and from the disk: how much longer a `fit` takes to begin.
- **Overhead** of saving every 100 steps: within one `fit`, the 20 steps during a save and its write in the background,
  against the 40 steps before and the 40 after; for that model and for a smaller one with very short steps; also with
  TensorFlow on one thread, which leaves a core to the write.
- **A restart** by `tfdist run --workers 2`: from SIGKILL of a worker to the message and to the first step of the next
  attempt, with and without `--warm-spares`, and from a checkpoint in memory, against a start without a failure; from
  SIGSTOP to the message.

Medians; the variants take turns within one run. Writes `recovery.json` to `benchmarks/results` and prints a table.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery
from tfdist.cluster import MEMORY_VARIABLE
from tfdist.strategies import MultiWorkerMirroredStrategy

_FILE = Path(__file__).parent / "results" / "recovery.json"
_UNITS = 1044  # four layers of about 1.09 M weights: 17 MB, with Adam's two moments 52 MB
_LARGE_UNITS = 2088  # with Adam's moments 209 MB
_SAVES, _TURNS, _RESTARTS = 12, 5, 3
_EVERY = 100  # steps
_BESIDE, _BASELINE = 20, 40  # steps: those during which a save is written; those before and after
_KILL_AT_STEP = 30
_HEARTBEAT_TIMEOUT_SECONDS = 3
_LONG_STEPS = "50 MB, 512 samples a step"
# Layers, units, samples a step, and how many saves.
_TRAININGS = {
    "50 MB, 128 samples a step": ([_UNITS] * 4, _UNITS, 128, 50),
    _LONG_STEPS: ([_UNITS] * 4, _UNITS, 512, 30),
    "8 MB, 16 samples a step": ([512, 512, 10], 784, 16, 150),
}


class _Clock(keras.callbacks.Callback):
    """Times each step of a `fit`, from its start to the start of the next one."""

    is_stateless = True

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []
        self._step_began = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now = time.perf_counter()
        if batch:
            self.steps.append(now - self._step_began)
        self._step_began = now


def measure_saves(folder: Path) -> dict[str, float]:
    """Returns by how many seconds a step with a save is longer than a step of a training without saves."""
    every = 8
    inputs = np.random.default_rng(0).normal(size=(_SAVES * every * 16, _UNITS)).astype("float32")
    intervals = {"background": every, "foreground": every, "memory": every, "without": 10**6}
    steps: dict[str, list[float]] = {name: [] for name in intervals}
    for turn in range(_TURNS):
        for name, interval in intervals.items():
            keras.utils.set_random_seed(0)
            model = _model(_UNITS)
            directory = folder / f"{name}-{turn}"
            recovery = FailureRecovery(
                directory,
                every_steps=None if name == "memory" else interval,
                memory_every_steps=interval if name == "memory" else None,
                keep=1,
                background=name != "foreground",
            )
            clock = _Clock()
            model.fit(inputs, inputs, batch_size=16, shuffle=False, verbose=0, callbacks=[clock, recovery])
            saves = clock.steps[every - 1 :: every]
            steps[name].append(statistics.median(clock.steps[every:] if name == "without" else saves))
    without = statistics.median(steps.pop("without"))
    return {name: statistics.median(seconds) - without for name, seconds in steps.items()}


def _model(units: int) -> keras.Model:
    layers = [keras.layers.Dense(units) for _ in range(4)]
    model = keras.Sequential([keras.Input((units,)), *layers])
    model.compile("adam", loss="mse", jit_compile=False)
    return model


class _TimedRecovery(FailureRecovery):
    """Times the beginning of a `fit`."""

    begin_seconds = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        began = time.perf_counter()
        super().on_train_begin(logs)
        self.begin_seconds = time.perf_counter() - began


class _End(keras.callbacks.Callback):
    """Ends a `fit` in its last step by an exception, as a failure does."""

    is_stateless = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            raise InterruptedError


def measure_restores(folder: Path) -> dict[str, float]:
    """Returns by how many seconds a `fit` that restores 200 MB takes longer to begin than one that restores nothing."""
    inputs = np.ones([3, _LARGE_UNITS], "float32")
    seconds: dict[str, list[float]] = {"memory": [], "disk": [], "nothing": []}
    for turn in range(_TURNS):
        for name, found in seconds.items():
            every = {"memory_every_steps" if name == "memory" else "every_steps": 10**6 if name == "nothing" else 1}
            for _ in range(2):  # the second one restores what the first has saved
                keras.backend.clear_session()
                recovery = _TimedRecovery(folder / f"restore-{name}-{turn}", background=False, **every)
                with contextlib.suppress(InterruptedError):
                    _model(_LARGE_UNITS).fit(inputs, inputs, batch_size=1, verbose=0, callbacks=[recovery, _End()])
            found.append(recovery.begin_seconds)
    nothing = statistics.median(seconds.pop("nothing"))
    return {name: statistics.median(found) - nothing for name, found in seconds.items()}


def measure_overhead(folder: Path, words: str = "") -> dict[str, dict[str, Any]]:
    """Returns by how many seconds and by what ratio a save lengthens 100 steps, if the name has `words`."""
    names = [name for name in _TRAININGS if words in name]
    found = {name: _overhead(folder / f"overhead-{n}", *_TRAININGS[name]) for n, name in enumerate(names)}
    command = [
        sys.executable,
        __file__,
        "--leave-a-core",
        str(folder),
        words,
    ]  # another process, as the number of threads is set at its start
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return found | {f"{name}, a core left": of for name, of in json.loads(output.splitlines()[-1]).items()}


def leave_a_core(folder: Path, words: str) -> None:
    """Prints the same for the trainings with short steps, with TensorFlow on one thread."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    short = (name for name in _TRAININGS if name != _LONG_STEPS and words in name)
    print(json.dumps({name: _overhead(folder / f"alone-{n}", *_TRAININGS[name]) for n, name in enumerate(short)}))


def _overhead(folder: Path, layers: list[int], units: int, batch: int, saves: int) -> dict[str, Any]:
    """Compares, in a `fit` that saves every 100 steps, the steps during a save with those before and after.

    Both are measured within a second or two, so that other load on the machine affects both equally.
    """
    inputs = np.random.default_rng(0).normal(size=(batch, units)).astype("float32")
    data = tf.data.Dataset.from_tensors((inputs, np.zeros([batch, layers[-1]], "float32"))).repeat()
    model = keras.Sequential([keras.Input((units,)), *(keras.layers.Dense(size) for size in layers)])
    model.compile("adam", loss="mse", jit_compile=False)
    recovery, clock = FailureRecovery(folder, every_steps=_EVERY, keep=1), _Clock()
    model.fit(data, steps_per_epoch=(saves + 2) * _EVERY, verbose=0, callbacks=[clock, recovery])
    costs, ratios, lengths = [], [], []
    for save in range(
        2 * _EVERY - 1, (saves + 2) * _EVERY - 1, _EVERY
    ):  # without the first one, before which `fit` traces
        others = clock.steps[save - _BASELINE : save] + clock.steps[save + _BESIDE : save + _BESIDE + _BASELINE]
        lengths.append(statistics.mean(others))
        costs.append(sum(clock.steps[save : save + _BESIDE]) - _BESIDE * lengths[-1])
        ratios.append(costs[-1] / (_EVERY * lengths[-1]))
    step = statistics.median(lengths)
    writes = sorted(recovery._writer.job_seconds)
    if writes[len(writes) * 9 // 10] > (_BESIDE - 1) * step:
        raise RuntimeError(f"Writes take longer than {_BESIDE} steps. Received: {writes}, and steps of {step} s.")
    return {
        "step": step,
        "a save costs": statistics.median(costs),
        "ratio": statistics.median(ratios),
        "95 % interval": _interval(ratios),
        "saves": len(ratios),
    }


def _interval(values: list[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, by ranks (normal approximation of the binomial distribution)."""
    ordered, middle, reach = sorted(values), (len(values) - 1) / 2, 0.98 * len(values) ** 0.5
    return ordered[max(0, math.floor(middle - reach))], ordered[min(len(values) - 1, math.ceil(middle + reach))]


def measure_restarts(folder: Path) -> dict[str, dict[str, float]]:
    """Returns the seconds from a start to its first step, and from SIGKILL to the message and to the next step."""
    found: dict[str, dict[str, list[float]]] = {}
    frozen = ["--heartbeat-timeout", str(_HEARTBEAT_TIMEOUT_SECONDS)]
    for turn in range(_RESTARTS):
        for name, signal_name, options in (
            ("cold", "SIGKILL", []),
            ("warm spares", "SIGKILL", ["--warm-spares"]),
            ("memory", "SIGKILL", []),
            ("frozen", "SIGSTOP", frozen),
        ):
            times = _restart(folder / f"{name}-{turn}".replace(" ", "-"), signal_name, options, name == "memory")
            found.setdefault("plain", {}).setdefault("start", []).append(times.pop("start"))
            for what, seconds in times.items():
                found.setdefault(name, {}).setdefault(what, []).append(seconds)
    return {name: {what: statistics.median(seconds) for what, seconds in of.items()} for name, of in found.items()}


def _restart(folder: Path, signal_name: str, options: list[str], in_memory: bool) -> dict[str, float]:
    folder.mkdir()
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", "--max-restarts", "1", *options]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    environment.pop("TF_CONFIG", None)
    began = time.time()
    process = subprocess.Popen(
        [*launcher, __file__, "--work", str(folder), signal_name, *(["--in-memory"] if in_memory else [])],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    detected = 0.0
    assert process.stderr is not None
    for line in process.stderr:
        if ("worker 1 failed:" in line or "worker 1 is frozen:" in line) and not detected:
            detected = time.time()
    if process.wait() != 0 or not detected:
        raise RuntimeError(f"The workers ended with {process.returncode}. Expected: 0, after one restart.")
    first, killed, next_first = (float((folder / name).read_text()) for name in ("first-0", "killed", "first-1"))
    return {"start": first - began, "detected": detected - killed, "next step": next_first - killed}


def work(folder: Path, signal_name: str, every_steps: str) -> None:
    """Trains as a worker; rank 1 sends itself the signal in the first attempt."""
    strategy = MultiWorkerMirroredStrategy()
    attempt = os.environ["TFDIST_ATTEMPT"]

    class Note(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == 1 and strategy.rank == 0:
                (folder / f"first-{attempt}").write_text(str(time.time()))
            if attempt == "0" and self.steps == _KILL_AT_STEP and strategy.rank == 1:
                # Until the warm spares have started, as they have in a real training.
                time.sleep(12)
                (folder / "killed").write_text(str(time.time()))
                os.kill(os.getpid(), signal.Signals[signal_name])

    with strategy.scope():
        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((32,)), *layers])
        model.compile("adam", loss="mse")
    inputs = np.ones([640, 32], "float32")
    model.fit(
        inputs,
        inputs[:, :1],
        batch_size=16,
        verbose=0,
        callbacks=[Note(), FailureRecovery(folder / "ckpt", **{every_steps: 10})],
    )


def _percent(overhead: dict[str, Any]) -> str:
    ratios = overhead["ratio"], *overhead["95 % interval"]
    return "{:.1%} ({:.1%} to {:.1%})".format(*ratios)


def main() -> int:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", nargs=2, metavar=("DIRECTORY", "SIGNAL"), help="internal: train as a worker in this directory"
    )
    parser.add_argument("--leave-a-core", nargs=2, metavar=("DIRECTORY", "WORDS"), help="internal: with one thread")
    parser.add_argument("--overhead-of", metavar="WORDS", help="only the overhead, for trainings with these words")
    parser.add_argument("--in-memory", action="store_true", help="internal: with --work, save to memory")
    parser.add_argument("--memory", action="store_true", help="only saves, restores and restarts, also from memory")
    arguments = parser.parse_args()
    if arguments.work:
        every_steps = "memory_every_steps" if arguments.in_memory else "every_steps"
        work(Path(arguments.work[0]), arguments.work[1], every_steps)
        return 0
    if arguments.leave_a_core:
        leave_a_core(Path(arguments.leave_a_core[0]), arguments.leave_a_core[1])
        return 0
    if arguments.overhead_of:
        with tempfile.TemporaryDirectory() as folder:
            overhead = measure_overhead(Path(folder), arguments.overhead_of)
        result = json.loads(_FILE.read_text())
        result["overhead"] |= overhead
        _FILE.write_text(json.dumps(result, indent=1) + "\n")
        for name, of in overhead.items():
            print(f"| {name}; {of['step'] * 1e3:.1f} ms per step | {_percent(of)} |")
        return 0
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        restarts = measure_restarts(Path(folder))
        os.environ[MEMORY_VARIABLE] = memory  # as the launcher sets it for workers
        saves, restores = measure_saves(Path(folder)), measure_restores(Path(folder))
        earlier = json.loads(_FILE.read_text())["overhead"] if arguments.memory else {}
        overhead = earlier or measure_overhead(Path(folder))
    versions = {"python": platform.python_version(), **{n: version(n) for n in ("tensorflow", "keras", "safetensors")}}
    result = {
        "versions": versions,
        "saves": saves,
        "restores": restores,
        "overhead": overhead,
        "restarts": restarts,
    }
    _FILE.write_text(json.dumps(result, indent=1) + "\n")
    rows = [
        ("a save of 50 MB delays a step by, ms", f"{saves['background'] * 1e3:.1f}"),
        ("the same save in the foreground, ms", f"{saves['foreground'] * 1e3:.1f}"),
        ("ratio", f"{saves['background'] / saves['foreground']:.1%}"),
        ("a save of 50 MB to memory delays a step by, ms", f"{saves['memory'] * 1e3:.1f}"),
        *((f"restoring 200 MB from the {name}, s", f"{seconds:.2f}") for name, seconds in restores.items()),
        *(
            (f"saving every 100 steps; {name}; {of['step'] * 1e3:.1f} ms per step", _percent(of))
            for name, of in overhead.items()
        ),
        ("a start to its first step, s", f"{restarts['plain']['start']:.1f}"),
        ("SIGKILL to the message, s", f"{restarts['cold']['detected']:.2f}"),
        (
            f"SIGSTOP to the message, --heartbeat-timeout {_HEARTBEAT_TIMEOUT_SECONDS}, s",
            f"{restarts['frozen']['detected']:.2f}",
        ),
        ("SIGKILL to the next step, s", f"{restarts['cold']['next step']:.1f}"),
        ("relative to a start", f"{restarts['cold']['next step'] / restarts['plain']['start']:.2f}"),
        ("with warm spares, s", f"{restarts['warm spares']['next step']:.1f}"),
        ("from a checkpoint in memory, s", f"{restarts['memory']['next step']:.1f}"),
    ]
    for what, figure in rows:
        print(f"| {what} | {figure} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
