"""A worker of `test_data_on_workers.py`: trains once for each kind of data, and injects faults.

    python on_workers_by_data.py FOLDER PLAN

PLAN is a JSON list with a fault for each attempt, `{"data", "rank", "at", "count", "do"}`, see `faults.arm`.
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import faults
import keras
import numpy as np
import training
from step_journal import StepJournal
from worker_journal import Journal

from tfdist.strategies import MultiWorkerMirroredStrategy

EPOCHS = 2
LOADERS = {"Grain": "grain", "StatefulDataLoader": "torchdata"}  # kinds of data, and the packages that they need
KINDS = ("arrays", "PyDataset", "generator", *(kind for kind in LOADERS if find_spec(LOADERS[kind])))


def main(folder, plan):
    strategy = MultiWorkerMirroredStrategy()
    attempt = int(os.environ["TFDIST_ATTEMPT"])
    fault = plan[attempt] if attempt < len(plan) else {"data": None}
    for kind in (*KINDS, "NaN"):
        steps = StepJournal(Journal(folder / kind / "journals" / str(strategy.rank)))
        callbacks = [steps, *([keras.callbacks.TerminateOnNaN()] if kind == "NaN" else [])]
        if fault["data"] == kind and fault["rank"] == strategy.rank:
            callbacks += faults.arm(fault, folder / kind / "checkpoints")
        result = training.train(
            folder / kind,
            kind=kind,
            strategy=lambda: strategy,
            log=f"log-{strategy.rank}.csv",
            callbacks=callbacks,
            epochs=EPOCHS,
            tell=steps.tell,
            every_steps=3,
            replay_data=kind == "generator",
        )
        np.savez(folder / kind / f"result-{strategy.rank}.npz", **result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
