"""The program of two workers of a plan: trains under `planned()`, under the same strategy by hand, and uncompressed."""

import dataclasses
import json
import sys
from pathlib import Path

import keras
import numpy as np
import without_autotuning

from tfdist.callbacks import CommunicationReport
from tfdist.strategies import MultiWorkerMirroredStrategy, planned

INPUTS = np.random.default_rng(0).normal(size=(96, 32)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(96, 64)).astype("float32")


def trained(strategy, *callbacks):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    model.fit(INPUTS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def main(folder):
    without_autotuning.install()
    strategy, report = planned(), CommunicationReport()
    rank = strategy.rank
    weights = {f"planned_{rank}": trained(strategy, report)}
    weights[f"hand_{rank}"] = trained(MultiWorkerMirroredStrategy(compression="int8", bucket_bytes=2048))
    dense = MultiWorkerMirroredStrategy()
    weights[f"dense_{rank}"] = trained(dense)
    seen = {
        "strategy": [type(strategy).__name__, strategy.plan.compression, strategy.num_workers],
        "comparison": dataclasses.asdict(report.plan_comparison),
    }
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    np.savez(folder / f"weights-{rank}.npz", **weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
