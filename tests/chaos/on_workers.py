"""A worker of `test_workers.py` and `test_random_kills.py`: trains, keeps a journal, and injects faults.

    python on_workers.py FOLDER PLAN KIND EPOCHS

PLAN is a JSON list with a fault for each attempt, `{"rank", "at", "count", "do"}`, see `faults.arm`.
KIND is "workers"; "own disks": each has its own disk; "memory": each has its own memory, too, and saves to the disk
rarely; or "replicas": two logical CPUs of one process.
"""

import json
import os
import sys
from pathlib import Path

from worker_journal import SAVING, Journal


def main(folder, plan, kind, epochs):
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    journal = Journal(folder / "journals" / str(rank))
    journal.phase("imports")
    import faults
    import numpy as np
    import tensorflow as tf
    import training
    from first_state import FirstState
    from step_journal import StepJournal

    from tfdist.checkpoint import CheckpointStore
    from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

    journal.watch(CheckpointStore, "save", SAVING)
    journal.phase("start of the cluster")
    if kind == "replicas":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy = MirroredStrategy(["CPU:0", "CPU:1"], compression="powersgd:2")
    else:
        strategy = MultiWorkerMirroredStrategy(compression="powersgd:2")
    journal.phase("making of the model")
    attempt, steps = int(os.environ["TFDIST_ATTEMPT"]), StepJournal(journal)
    callbacks = [steps, FirstState(folder / f"first-state-{rank}.npz")]
    has_own_disk, in_memory = kind in ("own disks", "memory"), kind == "memory"
    checkpoints = folder / (f"host-{rank}" if has_own_disk else "checkpoints")
    if attempt < len(plan) and plan[attempt]["rank"] == rank:
        callbacks += faults.arm(plan[attempt], checkpoints, in_memory=in_memory)
    result = training.train(
        folder,
        strategy=lambda: strategy,
        accumulation=2,
        log=f"log-{rank}.csv",
        callbacks=callbacks,
        epochs=epochs,
        tell=steps.tell,
        checkpoints=checkpoints,
        every_steps=9 if in_memory else 3,
        memory_every_steps=3 if in_memory else None,
        shared=not has_own_disk,
    )
    journal.phase("results")
    np.savez(folder / f"result-{rank}.npz", **result)
    journal.phase("end of the process")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
