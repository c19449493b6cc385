"""The program of the workers in `test_unequal_workers.py`: rank 0 has one device, rank 1 two."""

import json
import sys
from pathlib import Path

import elastic_programs
import numpy as np
import tensorflow as tf
import unequal_programs

from tfdist.compression import Policy
from tfdist.strategies import MultiWorkerMirroredStrategy


def reductions(strategy):
    """What `reduce` and `gather` return for values of replicas and for a value of each worker."""
    ids = strategy.experimental_distribute_values_from_function(lambda c: tf.constant([c.replica_id_in_sync_group]))
    of_worker = tf.constant([10.0 * (strategy.rank + 1)])
    of_replicas = strategy.run(lambda: tf.constant([3.0]))
    both = tf.function(lambda: [strategy.reduce(op, of_replicas, axis=None) for op in ("SUM", "MEAN")])
    with strategy.scope():
        variable = tf.Variable(1.0)
    try:
        strategy.reduce("SUM", variable, axis=None)
        summed = "returned"
    except ValueError:
        summed = "ValueError"
    return {
        "summed variable": summed,
        "ids": strategy.gather(ids, axis=0).numpy().tolist(),
        "gathered": strategy.gather(of_worker, axis=0).numpy().tolist(),
        "worker values": [strategy.reduce(op, of_worker, axis=None).numpy().tolist() for op in ("SUM", "MEAN")],
        "replica values": [value.numpy().tolist() for value in both()],
        "mean of rows": float(strategy.reduce("MEAN", of_replicas, axis=0)),
    }


def files(strategy, folder):
    """The rows of a file for each worker, in the parts of each step."""
    names = [str(folder / f"rows-{number}") for number in range(2)]
    if strategy.rank == 0:
        for number, name in enumerate(names):
            Path(name).write_text("".join(f"{number}{row}\n" for row in range(6)))
    strategy.gather(tf.zeros([1]), axis=0)
    data = strategy.experimental_distribute_dataset(tf.data.TextLineDataset(names).batch(6))
    return [[part.numpy().tolist() for part in strategy.experimental_local_results(batch)] for batch in data]


def main(folder: Path) -> None:
    rank = unequal_programs.set_devices()
    strategy = MultiWorkerMirroredStrategy()
    seen = {
        "replicas": strategy.num_replicas_in_sync,
        "of_workers": strategy.replicas_of_workers,
        **reductions(strategy),
    }
    outcomes = {name: program(strategy) for name, program in unequal_programs.PROGRAMS.items()}
    full_rank = Policy("powersgd:8", dense_below=0)  # loses nothing, however gradients are split
    outcomes["compressed"] = elastic_programs.compressed(MultiWorkerMirroredStrategy(compression=full_rank))
    outcomes["micro-batches"] = unequal_programs.accumulating(MultiWorkerMirroredStrategy(micro_batches=2))
    seen["files"] = [[[row.decode() for row in part] for part in step] for step in files(strategy, folder)]
    outcomes["resumed"], _ = unequal_programs.resumed(MultiWorkerMirroredStrategy, folder / "checkpoints")
    np.savez(folder / f"unequal-{rank}.npz", **elastic_programs.flat(outcomes))
    Path(folder, f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
