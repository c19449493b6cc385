"""The program of the workers in `test_shares_on_workers.py`: rank 0 has one device, rank 1 two."""

import json
import sys
from pathlib import Path

import elastic_programs
import keras
import moving_shares
import numpy as np
import share_programs
import tensorflow as tf
import unequal_programs
from graph_ancestors import ancestors

from tfdist.compression import Policy
from tfdist.load_balancing.step_timer import TimedStep
from tfdist.strategies import MultiWorkerMirroredStrategy


def refused(call):
    """The error of a call."""
    try:
        call()
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        return str(error)
    return "nothing"


def refusals(strategy):
    """The errors for data of which each worker reads its own."""
    data = tf.data.Dataset.from_tensor_slices(share_programs.INPUTS).batch(16)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    distribute = strategy.experimental_distribute_dataset
    return {
        "function": refused(lambda: strategy.distribute_datasets_from_function(lambda _: data)),
        "files": refused(lambda: distribute(data.with_options(options))),
        "shard": refused(lambda: distribute(data.shard(2, strategy.rank))),
        "no batches": refused(lambda: distribute(tf.data.Dataset.range(4))),
        "shares": refused(lambda: MultiWorkerMirroredStrategy(shares=[1, 2, 3])),
        "limits": refused(lambda: moving_shares.LoadBalancing(max_share=0.3).limits(2)),
    }


class Rows(keras.callbacks.Callback):
    """How many rows each worker has computed after each step, and for how long."""

    def __init__(self, strategy):
        super().__init__()
        self._shares, self._seen = strategy.row_shares, []

    def on_train_batch_end(self, batch, logs=None):
        self._seen.append([stats.samples for stats in self._shares.stats()])

    def seen(self):
        stats = self._shares.stats()
        return {
            "rows": np.diff(self._seen, axis=0).tolist(),
            "seconds": [one.seconds for one in stats],
            "waited": [one.waited_seconds for one in stats],
        }


def resumed(folder, **options):
    """The outcome of a training that another `fit` resumes, and its shares."""
    outcome, strategy = unequal_programs.resumed(lambda: MultiWorkerMirroredStrategy(**options), folder)
    return {**outcome, "shares": [one.share for one in strategy.row_shares.stats()]}


def static_shares(strategy):
    """Fixed shares of batches of a static size: each worker's rows have a static size."""
    sizes = []

    class Sizes(keras.layers.Layer):
        def call(self, inputs):
            if not tf.distribute.in_cross_replica_context():  # where Keras builds the model, from the whole batch
                sizes.append(inputs.shape[0])
            return inputs

    return share_programs.fixed_sizes(strategy, Sizes()), sizes


def note_order():
    """For each traced step whether its gradients wait for the clock."""
    found, ready = [], TimedStep.gradients_ready

    def gradients_ready(step, gradients):
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if graph is not None and step._gradients_at is None and step._graph is graph:
            dense = [getattr(one, "values", one) for one in gradients]
            found.append(all(step._start.op in ancestors(one.op) for one in dense))
        ready(step, gradients)

    TimedStep.gradients_ready = gradients_ready
    return found


def main(folder: Path, name: str) -> None:
    programs = getattr(share_programs, name)
    rank = unequal_programs.set_devices()
    ordered = note_order()
    moving_shares.install()
    strategy = moving_shares.strategy()
    rows = Rows(strategy)
    outcomes = {"thirty_steps": share_programs.thirty_steps(strategy, rows)}
    seen = {"refused": refusals(strategy), "steps": rows.seen()}
    for name, program in programs.items():
        outcomes[name] = program(moving_shares.strategy())
    if programs is share_programs.MORE:
        outcomes["micro-batches"] = unequal_programs.accumulating(moving_shares.strategy(micro_batches=2))
        outcomes["sharded state"] = share_programs.thirty_steps(moving_shares.strategy(shard_optimizer_state=True))
        full_rank = Policy("powersgd:8", dense_below=0)  # loses nothing, whatever the parts are
        outcomes["compressed"] = elastic_programs.compressed(moving_shares.strategy(compression=full_rank))
        outcomes["static"], seen["static sizes"] = static_shares(MultiWorkerMirroredStrategy(shares=[1, 3]))
        outcomes["resumed moving"] = resumed(folder / "moving", load_balancing=True)
    else:
        outcomes["fixed"] = unequal_programs.accumulating(MultiWorkerMirroredStrategy(shares=[3, 1]))
        outcomes["resumed"] = resumed(folder / "fixed", shares=[3, 1])
    seen["ordered"] = ordered
    np.savez(folder / f"shares-{rank}.npz", **elastic_programs.flat(outcomes))
    Path(folder, f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
