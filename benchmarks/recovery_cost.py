"""Measures the cost of recovery: a save, a training with saves, and a restart.

    python benchmarks/recovery_cost.py
    python benchmarks/recovery_cost.py --overhead-of "8 MB"    # a part of it; the other results in the file stay
    python benchmarks/recovery_cost.py --parts saves uploads   # likewise; the names are those in the file

- **A save** of a model of 50 MB (with Adam's state), when the one before is written: for how long it stalls `fit`,
  and how much longer a step is than in a training that does not save; to the disk, to the memory of the host, to an S3
  server on this machine (`store_server.py`); and if the write, with checksums and flush to disk, were not in the
  background.
- **Peers**: the same of two workers with a core each, which are separate hosts, and save to the memory of both: 50
  MB that are equal, each to its own memory, and 17 MB of each (residuals of compression) also to that of the other.
- **A restore** of 200 MB in one process, from memory and from the disk: how much longer a `fit` takes to begin.
- **Overhead** of saving every 100 steps: within one `fit`, the 20 steps during a save and its write in the background,
  against the 40 steps before and the 40 after; for that model and for a smaller one with very short steps; also with
  TensorFlow on one thread, which leaves a core to the write.
- **Uploads**: a training on both cores that saves 50 MB to that server: by how much a save lengthens it, against the
  steps before and after, as a part of 30 s; and the slowest step during an upload, against an ordinary one.
- **A restart** by `tfdist run --workers 2`: from SIGKILL of a worker to the message and to the first step of the next
  attempt, with and without `--warm-spares`, against a start without a failure; of a model of 200 MB from a checkpoint
  on disk and in memory; from SIGSTOP to the message.

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
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from store_server import StoreServer, store_server

from tfdist.callbacks import FailureRecovery
from tfdist.checkpoint.background_writer import BackgroundWriter
from tfdist.cluster import MEMORY_VARIABLE
from tfdist.strategies import MultiWorkerMirroredStrategy

Rows = Iterable[tuple[str, str]]
_FILE = Path(__file__).parent / "results" / "recovery.json"
_UNITS = 1044  # four layers of about 1.09 M weights: 17 MB, with Adam's two moments 52 MB
_LARGE_UNITS = 2088  # with Adam's moments 209 MB
_SAVES, _TURNS, _RESTARTS = 6, 6, 3
_SAVE_STEPS = 8
_UPLOADS, _UPLOAD_STEPS, _UPLOAD_SECONDS = 12, 400, 30
_EVERY = 100  # steps
_BESIDE, _BASELINE = 20, 40  # steps: those during which a save is written; those before and after
_BESIDE_UPLOAD = 60
_UPLOAD_SAMPLES = 64  # for steps of about 25 ms
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
    """Times each step of a `fit`, from its start to the start of the next one.

    Attributes:
        steps: Their seconds.
        stalls: For how many of these a save stalled `fit`.
        is_writing: Whether a checkpoint was still being written at the end of the step.
    """

    is_stateless = True

    def __init__(self, recovery: FailureRecovery, *, wait_every: int | None = None) -> None:
        """`wait_every`: waits, in no step, until nothing is written when so many steps end with a save."""
        super().__init__()
        self.steps: list[float] = []
        self.stalls: list[float] = []
        self.is_writing: list[bool] = []
        self._recovery, self._wait_every = recovery, wait_every
        self._step_began = self._stalled = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now, stalled = time.perf_counter(), self._recovery.stall_seconds
        if batch:
            self.steps.append(now - self._step_began)
            self.stalls.append(stalled - self._stalled)
            self.is_writing.append(_writer_of(self._recovery).is_busy)
        if self._wait_every is not None and (batch + 1) % self._wait_every == 0:
            _writer_of(self._recovery).wait()
        self._step_began, self._stalled = time.perf_counter(), stalled


def _writer_of(recovery: FailureRecovery) -> BackgroundWriter:
    return recovery._training_saves._writer


def measure_saves(folder: Path, server: StoreServer) -> dict[str, dict[str, float]]:
    """Returns for how many seconds a save stalls `fit`, and by how many a step with it is longer than one without."""
    inputs = np.random.default_rng(0).normal(size=(_SAVES * _SAVE_STEPS * 16, _UNITS)).astype("float32")
    steps: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    for turn in range(_TURNS):
        for name in ("disk", "foreground", "memory", "S3", "nothing"):
            keras.utils.set_random_seed(0)
            recovery = FailureRecovery(
                f"{server.url}/saves-{turn}" if name == "S3" else folder / f"{name}-{turn}",
                every_steps={"memory": None, "nothing": 10**6}.get(name, _SAVE_STEPS),
                memory_every_steps=_SAVE_STEPS if name == "memory" else None,
                keep=1,
                background=name != "foreground",
            )
            clock = _Clock(recovery, wait_every=_SAVE_STEPS)
            _model(_UNITS).fit(inputs, inputs, batch_size=16, shuffle=False, verbose=0, callbacks=[clock, recovery])
            of_saves = slice(2 * _SAVE_STEPS - 1, None, _SAVE_STEPS)  # without the first, whose copies take new memory
            steps.setdefault(name, []).extend(clock.steps[of_saves])
            stalls.setdefault(name, []).extend(clock.stalls[of_saves])
    ordinary = statistics.median(steps.pop("nothing"))
    return {
        name: {"stall": statistics.median(stalls[name]), "longer step": statistics.median(found) - ordinary}
        for name, found in steps.items()
    }


def measure_peers(folder: Path) -> dict[str, float]:
    """Returns for how many seconds `fit` of two workers stalls for a save to the memory of both, and its bytes."""
    _run_workers(folder, ["--save-to-peer", str(folder)])
    found = json.loads((folder / "peers.json").read_text())
    return {"stall": statistics.median(found["stalls"]), **found["bytes"]}


def save_to_peer(folder: Path) -> None:
    """Trains as a worker that is a separate host."""
    strategy = MultiWorkerMirroredStrategy(compression="int8")
    memory = Path(os.environ[MEMORY_VARIABLE], f"host-{strategy.rank}")
    memory.mkdir(parents=True)
    os.environ[MEMORY_VARIABLE] = str(memory)
    with strategy.scope():
        model = _model(_UNITS)
    inputs = np.ones([32 * _SAVE_STEPS * _SAVES * 2, _UNITS], "float32")
    recovery = FailureRecovery(folder / "unused", memory_every_steps=_SAVE_STEPS, handle_signals=False)
    clock = _Clock(recovery, wait_every=_SAVE_STEPS)
    sizes = {}

    class Sizes(keras.callbacks.Callback):
        is_stateless = True

        def on_train_end(self, logs: Any = None) -> None:
            _writer_of(recovery).wait()
            (checkpoint,) = memory.glob("*/ckpt-*")
            sizes.update({file.name: file.stat().st_size for file in checkpoint.glob("*.safetensors")})

    model.fit(inputs, inputs, batch_size=32, verbose=0, callbacks=[clock, Sizes(), recovery])
    if strategy.rank == 0:
        stalls = clock.stalls[2 * _SAVE_STEPS - 1 :: _SAVE_STEPS]
        (folder / "peers.json").write_text(json.dumps({"stalls": stalls, "bytes": sizes}))


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


def measure_uploads(server: StoreServer) -> dict[str, Any]:
    """Returns by how many seconds an upload lengthens a training, and its slowest step in multiples of ordinary ones.

    Steps with and without an upload are of the same half minute, so that other load on the machine affects both.
    """
    inputs = np.random.default_rng(0).normal(size=(_UPLOAD_SAMPLES, _UNITS)).astype("float32")
    data = tf.data.Dataset.from_tensors((inputs, inputs)).repeat()
    recovery = FailureRecovery(f"{server.url}/uploads", every_steps=_UPLOAD_STEPS, keep=1)
    clock, before = _Clock(recovery), server.cpu_seconds
    steps_per_epoch = (_UPLOADS + 2) * _UPLOAD_STEPS
    _model(_UNITS).fit(data, steps_per_epoch=steps_per_epoch, verbose=0, callbacks=[clock, recovery])
    found: dict[str, list[float]] = {}
    for save in range(2 * _UPLOAD_STEPS - 1, (_UPLOADS + 1) * _UPLOAD_STEPS, _UPLOAD_STEPS):
        end = save + clock.is_writing[save:].index(False) + 1
        others = clock.steps[save - _BESIDE_UPLOAD : save] + clock.steps[end : end + _BESIDE_UPLOAD]
        same_number = clock.steps[save - (end - save) : save]
        ordinary = statistics.median(others)
        for what, value in {
            "step": ordinary,
            "steps during an upload": end - save,
            "stall": clock.stalls[save],
            "an upload costs": sum(clock.steps[save:end]) - (end - save) * statistics.mean(others),
            "slowest step": max(clock.steps[save:end]) / ordinary,
            "slowest of as many before": max(same_number) / ordinary,
        }.items():
            found.setdefault(what, []).append(value)
    result: dict[str, Any] = {what: statistics.median(values) for what, values in found.items()}
    result["95 % interval of the cost"] = _interval(found["an upload costs"])
    result["slowest step of all"], result["slowest of all before"] = (
        max(found[name]) for name in ("slowest step", "slowest of as many before")
    )
    result["upload"] = statistics.median(_writer_of(recovery).job_seconds)
    result["server's processor time"] = (server.cpu_seconds - before) / len(_writer_of(recovery).job_seconds)
    return result


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
    recovery = FailureRecovery(folder, every_steps=_EVERY, keep=1)
    clock = _Clock(recovery)
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
    writes = sorted(_writer_of(recovery).job_seconds)
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


def measure_restarts(folder: Path, *, units: int | None = None) -> dict[str, dict[str, float]]:
    """Returns the seconds from a start to its first step, and from SIGKILL to the message and to the next step."""
    found: dict[str, dict[str, list[float]]] = {}
    frozen = ["--heartbeat-timeout", str(_HEARTBEAT_TIMEOUT_SECONDS)]
    small = {
        "cold": ("SIGKILL", "every_steps", []),
        "warm spares": ("SIGKILL", "every_steps", ["--warm-spares"]),
        "frozen": ("SIGSTOP", "every_steps", frozen),
    }
    large = {"disk": ("SIGKILL", "every_steps", []), "memory": ("SIGKILL", "memory_every_steps", [])}
    for turn in range(_RESTARTS):
        for name, (signal_name, every_steps, options) in (small if units is None else large).items():
            work = [signal_name, every_steps, str(units or "")]
            times = _restart(folder / f"{name}-{turn}".replace(" ", "-"), work, options)
            found.setdefault("plain", {}).setdefault("start", []).append(times.pop("start"))
            for what, seconds in times.items():
                found.setdefault(name, {}).setdefault(what, []).append(seconds)
    return {name: {what: statistics.median(seconds) for what, seconds in of.items()} for name, of in found.items()}


def _restart(folder: Path, work: list[str], options: list[str]) -> dict[str, float]:
    began = time.time()
    detected = _run_workers(folder, ["--work", str(folder), *work], ["--max-restarts", "1", *options])
    if not detected:
        raise RuntimeError("No worker has failed. Expected: one restart.")
    first, killed, next_first = (float((folder / name).read_text()) for name in ("first-0", "killed", "first-1"))
    return {"start": first - began, "detected": detected - killed, "next step": next_first - killed}


def _run_workers(folder: Path, arguments: list[str], options: Sequence[str] = ()) -> float:
    """Runs this file in two workers; returns when the launcher has detected a failure, 0 if it has not."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    for variable in ("TF_CONFIG", MEMORY_VARIABLE):
        environment.pop(variable, None)
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "2", *options, __file__]
    process = subprocess.Popen(
        [*launcher, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    detected, output = 0.0, []
    assert process.stderr is not None
    for line in process.stderr:
        output.append(line)
        if ("worker 1 failed:" in line or "worker 1 is frozen:" in line) and not detected:
            detected = time.time()
    if process.wait() != 0:
        raise RuntimeError(f"The workers ended with {process.returncode}. Expected: 0. {''.join(output[-20:])}")
    return detected


def work(folder: Path, signal_name: str, every_steps: str, units: int | None) -> None:
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
        if units is None:
            layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((32,)), *layers])
            model.compile("adam", loss="mse")
        else:
            model = _model(units)
    inputs = np.ones([640, units or 32], "float32")
    recovery = FailureRecovery(folder / "ckpt", **{every_steps: 10})
    model.fit(inputs, inputs if units else inputs[:, :1], batch_size=16, verbose=0, callbacks=[Note(), recovery])


def _percent(overhead: dict[str, Any]) -> str:
    ratios = overhead["ratio"], *overhead["95 % interval"]
    return "{:.1%} ({:.1%} to {:.1%})".format(*ratios)


def main() -> int:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs=4, help="internal: train as a worker, in a directory, until a signal")
    parser.add_argument("--save-to-peer", metavar="DIRECTORY", help="internal: train as a worker that is a host")
    parser.add_argument("--leave-a-core", nargs=2, metavar=("DIRECTORY", "WORDS"), help="internal: with one thread")
    parser.add_argument("--overhead-of", metavar="WORDS", help="only the overhead, for trainings with these words")
    parser.add_argument("--parts", nargs="+", choices=_ROWS, default=list(_ROWS), help="default: all")
    arguments = parser.parse_args()
    if arguments.work:
        folder, signal_name, every_steps, units = arguments.work
        work(Path(folder), signal_name, every_steps, int(units) if units else None)
        return 0
    if arguments.save_to_peer:
        save_to_peer(Path(arguments.save_to_peer))
        return 0
    if arguments.leave_a_core:
        leave_a_core(Path(arguments.leave_a_core[0]), arguments.leave_a_core[1])
        return 0
    result = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    with (
        tempfile.TemporaryDirectory() as name,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        store_server() as server,
    ):
        os.environ[MEMORY_VARIABLE] = memory  # as the launcher sets it for workers
        folder = Path(name)
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "saves": lambda: measure_saves(folder, server),
            "peers": lambda: measure_peers(folder / "peers"),
            "restores": lambda: measure_restores(folder),
            "uploads": lambda: measure_uploads(server),
            "overhead": lambda: measure_overhead(folder),
            "restarts": lambda: measure_restarts(folder),
            "restarts of 200 MB": lambda: measure_restarts(folder / "large", units=_LARGE_UNITS),
        }
        if arguments.overhead_of:
            arguments.parts = ["overhead"]
            overhead = result["overhead"] | measure_overhead(folder, arguments.overhead_of)
            measures["overhead"] = lambda: overhead
        names = ("tensorflow", "keras", "safetensors", "s3fs", "moto")
        result["versions"] = {"python": platform.python_version(), **{name: version(name) for name in names}}
        for part in arguments.parts:
            result[part] = measures[part]()
            _FILE.write_text(json.dumps(result, indent=1) + "\n")
            for what, figure in _ROWS[part](result[part]):
                print(f"| {what} | {figure} |", flush=True)
    return 0


def _rows_of_saves(saves: dict[str, Any]) -> Rows:
    for name, of in saves.items():
        yield f"a save of 50 MB ({name}) stalls `fit` for, ms", f"{of['stall'] * 1e3:.1f}"
        yield "… and lengthens a step by, ms", f"{of['longer step'] * 1e3:.1f}"


def _rows_of_uploads(uploads: dict[str, Any]) -> Rows:
    costs = uploads["an upload costs"], *uploads["95 % interval of the cost"]
    ratios = "{:.4f} ({:.4f} to {:.4f})".format(*(1 + cost / _UPLOAD_SECONDS for cost in costs))
    yield f"saving 50 MB to S3 every {_UPLOAD_SECONDS} s, {uploads['step'] * 1e3:.1f} ms per step, time in all", ratios
    yield (
        "slowest step of an upload, of ordinary ones; largest",
        "{:.1f}; {:.1f}".format(uploads["slowest step"], uploads["slowest step of all"]),
    )
    yield (
        "slowest of as many steps before; largest",
        "{:.1f}; {:.1f}".format(uploads["slowest of as many before"], uploads["slowest of all before"]),
    )


def _rows_of_restarts(restarts: dict[str, Any]) -> Rows:
    for name, of in restarts.items():
        yield from ((f"{name}: {what}, s", f"{seconds:.2f}") for what, seconds in of.items())


_ROWS: dict[str, Callable[[dict[str, Any]], Rows]] = {
    "saves": _rows_of_saves,
    "peers": lambda peers: [("a save to the memory of two hosts stalls `fit` for, ms", f"{peers['stall'] * 1e3:.1f}")],
    "restores": lambda restores: ((f"restoring 200 MB ({name}), s", f"{of:.2f}") for name, of in restores.items()),
    "uploads": _rows_of_uploads,
    "overhead": lambda overhead: (
        (f"saving every 100 steps; {name}; {of['step'] * 1e3:.1f} ms per step", _percent(of))
        for name, of in overhead.items()
    ),
    "restarts": _rows_of_restarts,
    "restarts of 200 MB": _rows_of_restarts,
}


if __name__ == "__main__":
    sys.exit(main())
