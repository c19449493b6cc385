"""The program of two workers in `test_sharded_on_workers.py`: each writes its observations to a folder.

Its arguments are the folder and the number of devices of each worker.
"""

import json
import sys
import time
from pathlib import Path

import keras
import numpy as np
import sharded_models
import tensorflow as tf

from tfdist import cluster
from tfdist.callbacks import FailureRecovery
from tfdist.compression import Policy
from tfdist.sharded_state import state_sharding
from tfdist.strategies import MultiWorkerMirroredStrategy, ShardedState


class Stop(keras.callbacks.Callback):
    """Ends `fit` by an error within the second epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer._iterations.numpy()) == 5:
            raise InterruptedError


def interrupted(strategy, folder):
    """Trains until the second step of the second epoch, with checkpoints after every second step."""
    model = sharded_models.compiled(strategy, sharded_models.OPTIMIZERS["resumed"])
    _fit_until_stopped(model, sharded_models.fit, folder)


def _fit_until_stopped(model, fit, folder):
    try:
        fit(model, callbacks=[Stop(), FailureRecovery(folder, every_steps=2)])
    except InterruptedError:
        return
    raise AssertionError("not interrupted")


def read_alone(model, rank, end):
    """Returns the error of a worker that reads a slot while the other one waits for that."""
    state_sharding.TIMEOUT_SECONDS = 2.0
    if rank:
        while not end.exists():
            time.sleep(0.05)
        return ""
    try:
        model.optimizer.variables[-1].numpy()
    except RuntimeError as error:
        return str(error)
    finally:
        end.touch()


def weights_in_parts(folder, rank, whole):
    """Trains, predicts, saves and loads a model whose weights are in parts, and interrupts it; returns what it saw."""
    parts = MultiWorkerMirroredStrategy(shard_weights=True)
    for kind, strategy in (("parts", parts), ("whole", whole)):
        model = sharded_models.wide(strategy)
        sharded_models.fit_wide(model)
        predictions = model.predict(sharded_models.WIDE, 16, verbose=0)
        loss = model.evaluate(sharded_models.WIDE, sharded_models.WIDE[:, :1], 16, verbose=0)
        np.savez(folder / f"wide-{kind}-{rank}.npz", predictions=predictions, loss=loss, **sharded_models.values(model))
        if strategy is parts:
            model.save(folder / f"wide-{rank}.keras")
            held = [
                sum(int(part.shape[0]) for part in weight.parts) for weight in model.weights if hasattr(weight, "parts")
            ]
    with parts.scope():
        loaded = keras.models.load_model(folder / f"wide-{rank}.keras")
    np.savez(folder / f"wide-loaded-{rank}.npz", **sharded_models.values(loaded))
    _fit_until_stopped(sharded_models.wide(parts), sharded_models.fit_wide, folder / "wide checkpoints")
    return held


def main(folder, *devices):
    own = int(devices[cluster.detect().rank])
    if own > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * own)
    sharded = MultiWorkerMirroredStrategy(shard_optimizer_state=True)
    whole = MultiWorkerMirroredStrategy()
    rank = sharded.rank
    seen = {"replicas": sharded.num_replicas_in_sync, "owned": {}}
    for name in ("momentum", "everything", "adafactor"):
        for strategy in (sharded, whole):
            model = sharded_models.trained(strategy, sharded_models.OPTIMIZERS[name])
            kind = "sharded" if strategy is sharded else "whole"
            np.savez(folder / f"{name}-{kind}-{rank}.npz", **sharded_models.values(model))
            if strategy is sharded:
                model.save(folder / f"{name}-{rank}.keras")
                seen["owned"][name] = [int(owned) for owned in sharded_models.owned_values(model)]
    compressed = MultiWorkerMirroredStrategy(
        shard_optimizer_state=ShardedState(accumulators=True, weights_dtype="bfloat16"),
        compression=Policy("bf16", dense_below=0),
    )
    model = sharded_models.trained(compressed, sharded_models.OPTIMIZERS["resumed"])
    np.savez(folder / f"compressed-{rank}.npz", **sharded_models.values(model))
    with sharded.scope():
        loaded = keras.models.load_model(folder / f"everything-{rank}.keras")
    np.savez(folder / f"loaded-{rank}.npz", **sharded_models.values(loaded))
    reference = sharded_models.trained(whole, sharded_models.OPTIMIZERS["resumed"])
    np.savez(folder / f"resumed-{rank}.npz", **sharded_models.values(reference))
    interrupted(
        MultiWorkerMirroredStrategy(shard_optimizer_state=ShardedState(accumulators=True)), folder / "checkpoints"
    )
    seen["held weights"] = weights_in_parts(folder, rank, whole)
    seen["read alone"] = read_alone(loaded, rank, folder / "read")
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
