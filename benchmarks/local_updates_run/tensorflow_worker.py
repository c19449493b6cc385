"""A worker that trains by `model.fit`, alone (the floor) or with local updates, over a link that the caller shapes."""

import json
import os
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
from network_run.worker import BATCHES, TENSORFLOW_PORT, Worker, WorkerSpec, serve

from local_updates_run.compared_modes import FLOOR, SYNC_EVERY, strategy_arguments


class LocalUpdatesWorker(Worker):
    """Holds the variants in one process on one core."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Configures TensorFlow. It must not be initialized before."""
        super().__init__(spec)
        workers = [f"{address}:{TENSORFLOW_PORT}" for address in spec.addresses]
        task = {"type": "worker", "index": spec.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)
        self._models: dict[str, tuple[Any, Any]] = {}

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates the models, first those with a strategy."""
        import keras
        import tensorflow as tf
        from workloads import WORKLOADS

        from tfdist.strategies import MultiWorkerMirroredStrategy

        workload = WORKLOADS[self.spec.workload]
        for name in sorted(names, key=lambda name: name == FLOOR):
            strategy = tf.distribute.get_strategy()
            if name != FLOOR:
                strategy = MultiWorkerMirroredStrategy(**strategy_arguments(name, SYNC_EVERY))
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = workload.build()
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
            shares = 1 if name == FLOOR else self.spec.workers
            parts = [workload.batch(index) for index in range(BATCHES * shares)]
            inputs, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
            options = tf.data.Options()
            options.autotune.enabled = False  # the end of its thread would be a part of the end of an epoch
            options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
            data = tf.data.Dataset.from_tensor_slices((inputs, labels))
            data = data.batch(workload.batch_size * shares, drop_remainder=True).repeat().with_options(options)
            self._models[name] = model, data
        sizes = [int(np.prod(variable.shape)) for variable in next(iter(self._models.values()))[0].trainable_variables]
        return {"sizes": sizes, "versions": {name: version(name) for name in ("tensorflow", "keras", "numpy")}}

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Trains an epoch; `seconds` are those of its steps, `end_seconds` those of the exchange at its end.

        `stated` is what was sent in the steps, `stated_at_end` what at the end.
        """
        import keras

        model, data = self._models[variant]
        counts = [getattr(model.distribute_strategy, "communication", None)]
        ends: list[float] = []
        exchanged: list[float] = []

        def note(batch: int, logs: Any) -> None:
            ends.append(time.perf_counter())
            if batch == steps - 1:
                counts.append(getattr(model.distribute_strategy, "communication", None))

        callback = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: ends.append(time.perf_counter()),
            on_train_batch_end=note,
            on_epoch_end=lambda epoch, logs: exchanged.append(time.perf_counter()),
        )
        model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[callback])
        counts.append(getattr(model.distribute_strategy, "communication", None))
        stated = [None, None]
        if counts[0] is not None:
            stated = [asdict(later - earlier) for earlier, later in zip(counts, counts[1:], strict=False)]
        return {
            "seconds": np.diff(ends).tolist(),
            "end_seconds": exchanged[0] - ends[-1],
            "stated": stated[0],
            "stated_at_end": stated[1],
        }

    def fingerprint(self, variant: str) -> dict[str, float]:
        """Returns the sum of the weights' absolute values."""
        weights = self._models[variant][0].trainable_variables
        return {"value": float(sum(np.abs(np.asarray(one)).sum(dtype=np.float64) for one in weights))}


if __name__ == "__main__":
    serve(LocalUpdatesWorker)
