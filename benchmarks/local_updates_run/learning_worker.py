"""The program of the workers that learn a task under each variant, started by `tfdist run`.

    learning_worker.py FOLDER TASK SEED SYNC_EVERY STEPS BATCH_SIZE VARIANT [VARIANT ...]

`STEPS` and `BATCH_SIZE` are 0 for those of the task. Rank 0 writes `FOLDER/TASK-SEED.json`: for each variant the
held-out metric after each part of the training, with the seconds and the bytes sent until then.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
from accuracy import TASKS, Task

from local_updates_run.compared_modes import strategy_arguments
from tfdist.strategies import MultiWorkerMirroredStrategy

_PARTS = 6


def learn(task: Task, seed: int, variant: str, sync_every: int) -> list[dict[str, float]]:
    """Trains a task's model on all workers, and evaluates it after each part of the steps."""
    strategy = MultiWorkerMirroredStrategy(**strategy_arguments(variant, sync_every))
    batches, held_out = task.data(seed, task.steps * task.batch_size)
    keras.utils.set_random_seed(seed)
    rise = task.steps // 20
    learning_rate = keras.optimizers.schedules.CosineDecay(
        0.0, task.steps - rise, alpha=0.1, warmup_target=task.learning_rate, warmup_steps=rise
    )
    with strategy.scope():
        model = task.build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
    before, seconds, curve = strategy.communication, 0.0, []
    rows = task.steps * task.batch_size // _PARTS
    for part in range(_PARTS):
        start = time.perf_counter()
        taken = [array[part * rows : (part + 1) * rows] for array in batches]
        model.fit(*taken, batch_size=task.batch_size, shuffle=False, verbose=0)
        seconds += time.perf_counter() - start
        sent = (strategy.communication - before).wire_bytes
        logs = model.evaluate(*held_out, batch_size=task.batch_size, verbose=0, return_dict=True)
        curve.append({"seconds": seconds, "bytes": sent, "metric": logs[task.metric], "loss": logs["loss"]})
    return curve


def main() -> None:
    """Learns with each variant."""
    folder, name, seed, sync_every, steps, batch_size, *variants = sys.argv[1:]
    task = TASKS[name]
    task = dataclasses.replace(task, steps=int(steps) or task.steps, batch_size=int(batch_size) or task.batch_size)
    rank = MultiWorkerMirroredStrategy().rank
    curves: dict[str, Any] = {}
    for variant in variants:
        curves[variant] = learn(task, int(seed), variant, int(sync_every))
        keras.backend.clear_session()
        if rank == 0:
            print(f"{name}, seed {seed}, {variant}: {curves[variant][-1]}", flush=True)
    if rank == 0:
        (Path(folder) / f"{name}-{seed}.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
