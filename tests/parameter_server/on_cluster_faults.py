"""The chief of `test_cluster_faults.py`: trains while a worker is late, killed or stopped.

    on_cluster_faults.py FOLDER CASES

CASES is "steps", or "phases" for workers that are killed within a round of several updates.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf
from backup_worker_round import left_out
from cluster_cases import INPUTS, LABELS, classifier, compiled, in_one_process
from cluster_step_cases import adversarial
from comparison import largest_difference

from tfdist.parameter_server.chief import ChiefTraining
from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

FOLDER = Path(sys.argv[1])
LIMIT_SECONDS = 120


def pids() -> dict[int, int]:
    """Returns the process ids of the workers by index, from the launcher's children."""
    launcher, found = os.getppid(), {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just exited
            continue
        config = next((entry[10:] for entry in environ if entry.startswith(b"TF_CONFIG=")), b"{}")
        task = json.loads(config).get("task", {})
        if task.get("type") == "worker":
            found[task["index"]] = int(pid)
    return found


class At(keras.callbacks.Callback):
    """Sends a signal to a worker after a batch of the second epoch."""

    def __init__(self, worker: int, number: signal.Signals) -> None:
        super().__init__()
        self.worker, self.signal, self.pid = worker, number, 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 3 and not self.pid and self.epoch == 1:
            self.pid = pids()[self.worker]
            os.kill(self.pid, self.signal)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.epoch = epoch


def fitted(strategy: tf.distribute.Strategy, *callbacks: keras.callbacks.Callback) -> dict:
    model = compiled(strategy, lambda: keras.optimizers.Adam(0.01), classifier)
    history = model.fit(INPUTS, LABELS, batch_size=21, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    return {
        "weights": model.get_weights(),
        "logs": history.history,
        "updates": int(model.optimizer.iterations.numpy()),
    }


def wait_for_another(worker: int, pid: int) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while pids().get(worker, pid) == pid:
        if time.monotonic() > end:
            raise TimeoutError(f"worker {worker} was not restarted")
        time.sleep(0.05)


def made_another() -> str:
    """Tries to create a second strategy; returns the error's message or "made"."""
    try:
        ParameterServerStrategy()
    except RuntimeError as error:
        return str(error)
    return "made"


def killed_between_phases() -> None:
    """Kills worker 0 after the first phase of a round, and worker 1 after the second phase of a later one."""
    reference = in_one_process(adversarial)
    strategy = ParameterServerStrategy(mode=Synchronous())
    run_phase, hits = ChiefTraining._run_phase, []
    calls = 0

    def seen(self, functions, batches, waiting, phase, mode):
        nonlocal calls
        used = run_phase(self, functions, batches, waiting, phase, mode)
        calls += 1
        if calls >= 4 * (len(hits) + 1) and phase == len(hits) < 2:
            if hits:
                wait_for_another(0, hits[0])
            hits.append(pids()[len(hits)])
            os.kill(hits[-1], signal.SIGKILL)
        return used

    ChiefTraining._run_phase = seen
    outcome = adversarial(strategy)
    result = {"hit": hits, "difference": largest_difference(outcome, reference), "counts": outcome["counts"]}
    (FOLDER / "results.json").write_text(json.dumps(result | {"right counts": reference["counts"]}))


def main() -> None:
    reference = in_one_process(fitted)
    results: dict = {"second strategies": []}
    strategy = ParameterServerStrategy()
    results["left out"] = left_out(strategy, FOLDER)
    for name, mode, worker, number in (
        ("synchronous, killed", Synchronous(), 0, signal.SIGKILL),
        ("asynchronous, killed", Asynchronous(), 1, signal.SIGKILL),
        ("synchronous, stopped", Synchronous(), 1, signal.SIGSTOP),
    ):
        strategy.mode = mode  # a model reads it when its training starts
        fault = At(worker, number)
        outcome = fitted(strategy, fault)
        results[name] = {
            "hit": fault.pid,
            "updates": outcome["updates"],
            "difference": largest_difference(outcome, reference),
            "loss": [outcome["logs"]["loss"][-1], reference["logs"]["loss"][0]],
        }
        results["second strategies"].append(made_another())
        if name != "synchronous, stopped":
            wait_for_another(worker, fault.pid)
        (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    {"steps": main, "phases": killed_between_phases}[sys.argv[2]]()
