"""The program of the workers in `test_elastic_on_workers.py`.

python on_workers_elastic.py same FOLDER          the programs, on the present workers
python on_workers_elastic.py disturbed FOLDER     a training that resumes with fewer workers, and later with more
python on_workers_elastic.py uneven FOLDER        the same for a model without dropout and batch statistics
"""

import json
import os
import sys
from pathlib import Path

import elastic_programs
import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery
from tfdist.compression import Policy
from tfdist.strategies import MultiWorkerMirroredStrategy

# By attempts: which rank fails after how many more steps.
FAULTS = [(1, 4), (1, 4), (0, 5)]


class Fault(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("on purpose")


def train(strategy, checkpoints, callbacks=(), *, plain=False, accumulation_steps=None):
    """Six epochs of three steps, with a last batch that is smaller."""
    with strategy.scope():
        model = elastic_programs.plain_network() if plain else elastic_programs.network(own=False)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5, gradient_accumulation_steps=accumulation_steps)
        model.compile(optimizer, loss, metrics=["accuracy"])
    rows = elastic_programs.INPUTS, elastic_programs.LABELS
    data = tf.data.Dataset.from_tensor_slices(rows).shuffle(elastic_programs.ROWS, seed=3).batch(16)
    recovery = FailureRecovery(checkpoints, every_steps=1)
    history = model.fit(data, epochs=6, verbose=0, callbacks=[recovery, *callbacks])
    logs = [history.history[name] for name in sorted(history.history)]
    return {"weights": model.get_weights(), "logs": logs, "iterations": [int(model.optimizer.iterations.numpy())]}


def same(folder):
    strategy = MultiWorkerMirroredStrategy()
    outcomes = {name: program(strategy) for name, program in elastic_programs.PROGRAMS.items()}
    low_rank = Policy("powersgd:1", dense_below=0)
    outcomes["powersgd"] = elastic_programs.compressed(MultiWorkerMirroredStrategy(compression=low_rank))
    outcomes["powersgd in parts"] = elastic_programs.compressed(
        MultiWorkerMirroredStrategy(compression=low_rank, micro_batches=2)
    )
    doubled = MultiWorkerMirroredStrategy(micro_batches=2)
    outcomes["of four"] = elastic_programs.everything(doubled)
    np.savez(folder / f"same-{strategy.rank}.npz", **elastic_programs.flat(outcomes))


def disturbed(folder, *, plain=False):
    strategy = MultiWorkerMirroredStrategy()
    attempt = int(os.environ["TFDIST_ATTEMPT"])
    seen = {"workers": strategy.num_workers, "micro_batches": strategy.micro_batches}
    Path(folder, f"attempt-{attempt}-{strategy.rank}.json").write_text(json.dumps(seen))
    callbacks = []
    if attempt < len(FAULTS) and FAULTS[attempt][0] == strategy.rank:
        callbacks.append(Fault(FAULTS[attempt][1]))
    outcome = train(strategy, folder / "checkpoints", callbacks, plain=plain)
    np.savez(folder / f"disturbed-{strategy.rank}.npz", **elastic_programs.flat({"training": outcome}))


def uneven(folder):
    disturbed(folder, plain=True)


if __name__ == "__main__":
    {"same": same, "disturbed": disturbed, "uneven": uneven}[sys.argv[1]](Path(sys.argv[2]))
