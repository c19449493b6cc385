"""The chief of `test_federated_faults.py`: clients' workers are stopped or killed, or the chief is."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from cluster_cases import FEATURES, INPUTS, LABELS
from on_cluster_faults import pids

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import FederatedAveraging, ParameterServerStrategy

LIMIT_SECONDS = 120
CLIENTS, ROUNDS = 5, 12
MODE = FederatedAveraging(
    local_steps=3, clients=CLIENTS, clients_per_round=3, server_optimizer=keras.optimizers.Adam(0.05), seed=1
)


def dataset_fn(context):
    start = context.input_pipeline_id * 40
    data = tf.data.Dataset.from_tensor_slices((INPUTS[start : start + 40], LABELS[start : start + 40]))
    return data.shuffle(40, seed=context.input_pipeline_id).batch(8)


def compiled(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def fit(strategy, *callbacks, epochs=2, **arguments):
    model = compiled(strategy)
    data = strategy.distribute_datasets_from_function(dataset_fn)
    arguments = {"steps_per_epoch": ROUNDS // 2, "verbose": 0, "validation_data": (INPUTS, LABELS), **arguments}
    history = model.fit(data, epochs=epochs, callbacks=list(callbacks), **arguments).history
    return model, history


class At(keras.callbacks.Callback):
    """Calls a function at the beginning of a round."""

    def __init__(self, actions):
        super().__init__()
        self.actions = actions

    def on_train_batch_begin(self, batch, logs=None):
        if batch in self.actions:
            self.actions[batch]()


def wait_for(condition):
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("nothing has happened")
        time.sleep(0.02)


def stopped(strategy):
    """A worker is stopped for some rounds, continues, and takes part again."""
    strategy.mode = dataclasses.replace(MODE, deadline_seconds=10.0, clients_per_round=CLIENTS)
    pid, before = pids()[1], strategy.worker_stats
    actions = {4: lambda: os.kill(pid, signal.SIGSTOP), 8: lambda: os.kill(pid, signal.SIGCONT)}
    began = time.monotonic()
    try:
        model, history = fit(strategy, At(actions), epochs=1, steps_per_epoch=ROUNDS)
    finally:
        os.kill(pid, signal.SIGCONT)
    rounds = int(model.optimizer.iterations.numpy())
    seconds = time.monotonic() - began
    data = strategy.distribute_datasets_from_function(dataset_fn)
    of_worker = [now.since(then) for now, then in zip(strategy.worker_stats, before, strict=True)][1]

    def takes_part():
        model.fit(data, steps_per_epoch=1, verbose=0)
        now = strategy.worker_stats[1].since(before[1])
        return now.left_out >= 1 and now.steps > of_worker.steps + 2

    wait_for(takes_part)
    return {"rounds": rounds, "loss": history["loss"], "seconds": seconds, "left_out": of_worker.left_out}


def killed(strategy):
    """In each round a worker is killed; the next round begins when it is back."""
    strategy.mode = dataclasses.replace(MODE, clients_per_round=CLIENTS)
    hit = []

    def kill_in_round(number):
        worker = number % strategy.num_workers
        if number > 0:
            last = hit[-1]
            wait_for(lambda: pids().get((number - 1) % strategy.num_workers, last[0]) != last[0])
        hit.append((pids()[worker], signal.SIGKILL))
        threading.Timer(0.03, os.kill, hit[-1]).start()

    actions = {number + 1: lambda number=number: kill_in_round(number) for number in range(6)}
    model, history = fit(strategy, At(actions), epochs=1, steps_per_epoch=8)
    return {
        "hit": len(hit),
        "rounds": int(model.optimizer.iterations.numpy()),
        "finite": bool(all(np.isfinite(one).all() for one in model.get_weights())),
        "loss": history["loss"],
    }


def resumed(strategy, folder):
    """The chief is killed in its first attempt; in the second one it resumes. Returns what differs."""
    strategy.mode = MODE
    uninterrupted, expected = fit(strategy)
    actions = {}
    if not (folder / "killed").exists():

        def kill():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        actions = {4: kill}

    class InSecondEpoch(At):
        def on_epoch_begin(self, epoch, logs=None):
            self.actions = actions if epoch == 1 else {}

    recovery = FailureRecovery(folder / "checkpoints", every_steps=2)
    model, history = fit(strategy, InSecondEpoch({}), recovery)
    pairs = [
        *zip(uninterrupted.get_weights(), model.get_weights(), strict=True),
        *(
            (one.numpy(), other.numpy())
            for one, other in zip(
                uninterrupted._tfdist_server_optimizer.variables, model._tfdist_server_optimizer.variables, strict=True
            )
        ),
    ]
    return {
        "equal": bool(all(np.array_equal(one, other) for one, other in pairs)),
        "compared": len(pairs),
        "rounds": int(model.optimizer.iterations.numpy()),
        "loss": [history["loss"], expected["loss"]],
        "validation": [history["val_loss"], expected["val_loss"]],
        "attempts_before": int((folder / "killed").exists()),
    }


def main(folder, *names):
    cases = {"stopped": stopped, "killed": killed, "resumed": lambda strategy: resumed(strategy, folder)}
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    strategy = ParameterServerStrategy(mode=MODE)
    for name in names:
        if name not in results:
            results[name] = cases[name](strategy)
            path.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
