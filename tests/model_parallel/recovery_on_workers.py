"""The program of a chief whose stages are on two workers: saves, interruptions, damage, other layouts, lost workers.

Writes what happened to `results.json` in the folder that it gets.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from test_callbacks_in_stages import Interruption, train

from tfdist.callbacks import FailureRecovery
from tfdist.checkpoint.checkpoint_store import CheckpointStore
from tfdist.checkpoint.manifest import FileRecord, Manifest
from tfdist.strategies import ModelParallelStrategy, Pipeline
from tfdist.tensorflow_internals import placed_strategy
from tfdist.utils.cores_and_ports import ReservedPorts

WORKERS = [f"/job:worker/task:{index}/device:CPU:0" for index in range(2)]
OWN = ["CPU:0", "CPU:1"]
placed_strategy._PIECE = 100  # bytes, so that the values of workers come in several
DATA = "worker-1.data-00000-of-00001"


@contextmanager
def workers(folder: Path) -> Iterator[list[int]]:
    """Starts two workers in directories of their own, and connects to them."""
    with ReservedPorts(3) as reserved:
        chief, *others = (f"127.0.0.1:{port}" for port in reserved.ports)
    spec = {"worker": others, "chief": [chief]}
    program = str(Path(__file__).with_name("stage_worker.py"))
    started = []
    try:
        for task in range(2):
            (folder / f"host-{task}").mkdir()
            command = [sys.executable, program, json.dumps(spec), str(task)]
            started.append(subprocess.Popen(command, cwd=folder / f"host-{task}"))
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(spec), job_name="chief", task_index=0)
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def made(devices: list[str], stages: int = 2, columns: int = 1) -> keras.Model:
    keras.utils.set_random_seed(3)
    strategy = ModelParallelStrategy(devices, pipeline=Pipeline(stages=stages), data_parallel=columns)
    with strategy.scope():
        middle = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1)]
        model = keras.Sequential([keras.Input((12,)), *middle, keras.layers.Dense(12)])
        model.compile(keras.optimizers.Adam(1e-2, use_ema=True), "mse", metrics=["mae"])
    return model


def state(model: keras.Model) -> list[np.ndarray]:
    return [one.numpy() for one in [*model.variables, *model.optimizer.variables]]


def equal(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def statuses(directory: Path) -> list[str]:
    return [info.status for info in CheckpointStore(directory).list_checkpoints(verify_checksums=True)]


class Signalled(keras.callbacks.Callback):
    """Sends a signal to a worker after a step, before its checkpoint."""

    is_stateless = True

    def __init__(self, pid: int, number: int, step: int) -> None:
        super().__init__()
        self.pid, self.number, self.step = pid, number, step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step -= 1
        if not self.step:
            os.kill(self.pid, self.number)


def newest(directory: Path) -> Path:
    return max(directory.glob("ckpt-*"))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def resumes(folder: Path) -> dict[str, Any]:
    """An interrupted training, and the same on other devices and from damaged files."""
    found: dict[str, Any] = {}
    undisturbed = made(WORKERS)
    history = train(undisturbed, FailureRecovery(folder / "a", every_steps=2))
    expected = state(undisturbed)
    found["files"] = {
        path.name: [[name, str(shape)] for name, shape in tf.train.list_variables(str(path.with_suffix("")))]
        for path in sorted(newest(folder / "a").glob("*.index"))
    }
    found["chief tensors"] = CheckpointStore(folder / "a").newest()[0].read_shared().tensors.keys() | set()
    interrupted = made(WORKERS)
    found["interruption"] = error_of(lambda: interrupt(interrupted, folder / "b"))
    for name, damage in {
        "intact": lambda path: None,
        "damaged": lambda path: flip(path / DATA),
        "missing": lambda path: (path / "worker-0.index").unlink(),
    }.items():
        directory = copytree(folder / "b", folder / name)
        damage(newest(directory))
        resumed = made(WORKERS)
        same = train(resumed, FailureRecovery(directory, every_steps=2)) == history
        found[name] = [same, equal(state(resumed), expected)]
    found["statuses"] = statuses(folder / "a")

    # A training that is complete is restored, and trains nothing.
    for name, layout in {
        "two columns": (WORKERS, 1, 2),
        "the workers exchanged": (WORKERS[::-1], 2, 1),
        "this process": (OWN, 2, 1),
        "both": ([WORKERS[0], OWN[0]], 2, 1),
    }.items():
        other = made(*layout)
        train(other, FailureRecovery(folder / "a"))
        found[name] = equal(state(other), expected)
    local = made(OWN)
    train(local, FailureRecovery(folder / "own"))
    again = made(WORKERS)
    train(again, FailureRecovery(folder / "own"))
    found["from this process"] = equal(state(again), state(local))
    columns = made(WORKERS, 1, 2)
    train(columns, FailureRecovery(folder / "columns"))
    sizes = [path.stat().st_size for path in sorted(newest(folder / "columns").glob("*.data-*"))]
    found["sizes of two columns"] = sizes
    return found


def interrupt(model: keras.Model, directory: Path) -> None:
    try:
        train(model, FailureRecovery(directory, every_steps=2, background=False), Interruption(9))
    except KeyboardInterrupt:
        raise RuntimeError("interrupted") from None


def failures(folder: Path, pids: list[int]) -> dict[str, Any]:
    """Named errors, after which all checkpoints are complete."""
    found: dict[str, Any] = {}
    # The checksum of the file is right, that of the tensor within it is not.
    path = newest(copytree(folder / "b", folder / "torn"))
    for name in (DATA, "worker-0.data-00000-of-00001"):
        flip(path / name)
        manifest = Manifest.from_bytes((path / "manifest.json").read_bytes())
        manifest = replace(manifest, files={**manifest.files, name: FileRecord.of(path / name)})
        (path / "manifest.json").write_bytes(manifest.to_bytes())
    found["torn"] = error_of(lambda: train(made(WORKERS), FailureRecovery(folder / "torn")))
    # A path that is another directory on each "host".
    os.chdir(folder)
    found["not shared"] = error_of(lambda: train(made(WORKERS), FailureRecovery("/proc/self/cwd/checkpoints")))
    for name, number in (("frozen", signal.SIGSTOP), ("killed", signal.SIGKILL)):
        recovery = FailureRecovery(folder / name, every_steps=2, peer_timeout_seconds=10, background=False)
        callbacks = [recovery, Signalled(pids[1], number, 4)]
        found[name] = error_of(lambda callbacks=callbacks: train(made(WORKERS), *callbacks))
        os.kill(pids[1], signal.SIGCONT)
        found[f"{name} statuses"] = statuses(folder / name)
    return found


def main(folder: Path) -> None:
    with workers(folder) as pids:
        found = resumes(folder) | failures(folder, pids)
    found["chief tensors"] = sorted(found["chief tensors"])
    (folder / "results.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
