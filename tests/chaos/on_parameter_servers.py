"""The chief of `test_parameter_server_faults.py`: trains in rounds or by pushes, and injects faults.

    python on_parameter_servers.py FOLDER PLAN KIND

PLAN is a JSON list of faults by attempt, `{"at", "count", "do"}` as in `faults.arm`, and "whom": "chief" or "ps".
KIND is "rounds", whose training ends with the same bits whatever happens; "pushes", on data created by the workers; or
"notebook", in which `fit` is interrupted in the middle of an accumulation and called again.
"""

import json
import os
import signal
import sys
from pathlib import Path

import faults
import keras
import numpy as np
import tensorflow as tf
import training

from tfdist.callbacks import FailureRecovery, WorkerReport
from tfdist.parameter_server.chief import ChiefTraining
from tfdist.parameter_server.scheduler import Scheduler
from tfdist.strategies import ParameterServerStrategy, Synchronous

PUSHES, EPOCHS = 10, 3


def server_pid():
    """The process of parameter server 0, among the children of the process that started this one."""
    launcher = os.getppid()
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            environ = Path(f"/proc/{pid}/environ").read_text()
        except OSError:  # it has just exited
            continue
        if '"task": {"type": "ps", "index": 0}' in environ:
            return int(pid)
    raise RuntimeError("there is no parameter server")


def strike(fault):
    """Replaces `faults._strike`: the server may be killed instead."""
    print(f"fault: {fault}", flush=True)
    os.kill(server_pid() if fault["whom"] == "ps" else os.getpid(), getattr(signal, fault["do"]))


def in_rounds(folder, callbacks):
    strategy = ParameterServerStrategy(mode=Synchronous(), gradient_accumulation_steps=2)
    result = training.train(
        folder, strategy=lambda: strategy, callbacks=[*callbacks, WorkerReport()], every_steps=3, background=False
    )
    counts = strategy.worker_stats
    return {
        **result,
        "steps of workers": np.array([count.steps for count in counts]),
        "seconds of workers": np.array([[count.seconds, count.held_up_seconds] for count in counts]),
    }


def dataset(context):
    del context
    random = np.random.default_rng(0)
    samples = random.normal(size=(40, 4)).astype("float32"), np.ones([40, 3], "float32")
    return tf.data.Dataset.from_tensor_slices(samples).shuffle(40).repeat().batch(4)


def by_pushes(folder, callbacks):
    strategy = ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        # At this rate the loss falls to a tenth, whatever the first weights and the order of the samples are.
        model.compile(keras.optimizers.Adam(0.05), "mse")
    history = model.fit(
        strategy.distribute_datasets_from_function(dataset),
        steps_per_epoch=PUSHES,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            *callbacks,
            WorkerReport(),
            FailureRecovery(folder / "checkpoints", every_steps=4, background=False),
        ],
    )
    return {
        "iterations": model.optimizer.iterations.numpy(),
        **{f"history {name}": np.array(values) for name, values in history.history.items()},
    }


def interrupt_round(count):
    """Interrupts the `count`-th round from now on while its parts are computed."""
    wait, left = Scheduler.wait, [count]

    def interrupted(self, until, collect):
        left[0] -= len(self) > 0
        if left[0] == 0:
            Scheduler.wait = wait
            raise KeyboardInterrupt
        wait(self, until, collect)

    Scheduler.wait = interrupted


def watch_numbers():
    """Returns a list that collects the numbers of updates, from which seeds are computed."""
    numbers, next_number = [], ChiefTraining._next_number

    def seen(self):
        numbers.append(next_number(self))
        return numbers[-1]

    ChiefTraining._next_number = seen
    return numbers


class Interrupt(keras.callbacks.Callback):
    is_stateless = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise KeyboardInterrupt


def in_notebook(folder, callbacks):
    strategy = ParameterServerStrategy(mode=Synchronous(), gradient_accumulation_steps=2)
    random = np.random.default_rng(0)
    samples = random.normal(size=(32, 4)).astype("float32"), np.ones([32, 1], "float32")
    weights, numbers = [], watch_numbers()
    for name in ("undisturbed", "interrupted"):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.01), "mse")

        def fit(*others, model=model, name=name):
            recovery = FailureRecovery(folder / name, every_steps=3, background=False)
            model.fit(*samples, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[*others, recovery])

        if name == "interrupted":
            for interrupt in ([Interrupt()], []):
                if not interrupt:
                    interrupt_round(2)
                try:
                    fit(*interrupt)
                except KeyboardInterrupt:
                    print("interrupted")
        fit()
        weights.append([*model.get_weights(), model.optimizer.iterations.numpy()])
        if name == "undisturbed":
            assert numbers == [*range(int(model.optimizer.iterations.numpy()))], "over epochs and saves"
    pairs = zip(*weights, strict=True)
    np.savez(folder / "both.npz", *[array for pair in pairs for array in pair])
    model.fit(*samples, batch_size=4, verbose=0, callbacks=callbacks)
    return {}


def main(folder, plan, kind):
    attempt, faults._strike = int(os.environ.get("TFDIST_ATTEMPT", "0")), strike
    callbacks = faults.arm(plan[attempt], folder / "checkpoints") if attempt < len(plan) else []
    np.savez(
        folder / "result.npz",
        **{"rounds": in_rounds, "pushes": by_pushes, "notebook": in_notebook}[kind](folder, callbacks),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
