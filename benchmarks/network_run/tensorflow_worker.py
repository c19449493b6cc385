"""A worker that trains with TensorFlow: without gradient exchange, with stock `tf.distribute`, and with tfdist."""

import json
import os
import time
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np

from network_run import variants
from network_run.worker import BATCHES, EXCHANGE_PORT, TENSORFLOW_PORT, Worker, WorkerSpec, serve

_LEARNING_RATE = 1e-3


class _Step:
    """A model with the training step that all variants share; only the reduction differs."""

    def __init__(self, strategy: Any, workload: Any, batches: Any, *, compiled: bool) -> None:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(0)
        self.strategy = strategy
        with strategy.scope():
            self.model = workload.build()
            self.optimizer = keras.optimizers.Adam(_LEARNING_RATE)
            self.optimizer.build(self.model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        replicas = strategy.num_replicas_in_sync

        def replica_step(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, self.model(inputs, training=True)) / replicas
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss

        @tf.function(jit_compile=compiled or None)
        def step(inputs: Any, labels: Any) -> Any:
            return strategy.run(replica_step, args=(inputs, labels))

        self._step = step
        self._batches = [(tf.constant(inputs), tf.constant(labels)) for inputs, labels in batches]
        self._taken = 0

    def take(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            batch = self._batches[self._taken % len(self._batches)]
            self._taken += 1
            start = time.perf_counter()
            # Reads the loss, as a training loop does to print it.
            float(self._step(*batch))
            seconds.append(time.perf_counter() - start)
        return seconds


class _Fit:
    """A model that trains by `model.fit`; a step is timed from the end of the previous step to its end."""

    def __init__(self, strategy: Any, workload: Any, global_batches: Any, *, compiled: bool) -> None:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(0)
        self.strategy = strategy
        with strategy.scope():
            self.model = workload.build()
            self.optimizer = keras.optimizers.Adam(_LEARNING_RATE)
            self.model.compile(
                self.optimizer,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=compiled,
            )
        inputs, labels = (np.concatenate(part) for part in zip(*global_batches, strict=True))
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        batch_size = len(global_batches[0][0])
        data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(batch_size, drop_remainder=True)
        self._data = data.repeat().with_options(options)

    def take(self, steps: int) -> list[float]:
        import keras

        ends: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: ends.append(time.perf_counter()),
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
        )
        self.model.fit(self._data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[note])
        return np.diff(ends).tolist()


class TensorFlowWorker(Worker):
    """Holds a group of TensorFlow variants in one process: tfdist's, with one exchange, or TensorFlow's own."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Configures TensorFlow for one core. TensorFlow must not be initialized before."""
        super().__init__(spec)
        import tensorflow as tf
        from workloads import WORKLOADS

        tf.config.threading.set_intra_op_parallelism_threads(1)
        # One more, as tfdist does: these threads also answer the other workers. PyTorch's gloo has threads for that.
        tf.config.threading.set_inter_op_parallelism_threads(2)
        self._workload = WORKLOADS[spec.workload]
        self._trained: dict[str, _Step | _Fit] = {}

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates the strategies and models, and stores this worker's batches for the other frameworks."""
        workers, rank = self.spec.workers, self.spec.rank
        is_stock = variants.BY_NAME[names[0]].reduction == variants.STOCK
        port = TENSORFLOW_PORT if is_stock else EXCHANGE_PORT  # plus the rank, as workers may be on one host
        addresses = [f"{address}:{port + number}" for number, address in enumerate(self.spec.addresses)]
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
        batch, count = self._workload.batch, BATCHES
        batches = [batch(index * workers + rank) for index in range(count)]
        inputs, labels = (np.stack(part) for part in zip(*batches, strict=True))
        np.savez(self.spec.batches_file, inputs=inputs, labels=labels)
        for variant in (variants.BY_NAME[name] for name in names):
            strategy, compiled = _strategy_of(variant), variant.compiled
            if variant.reduction == variants.FIT:
                rows = [[batch(index * workers + r) for r in range(workers)] for index in range(count)]
                together = [tuple(np.concatenate(part) for part in zip(*row, strict=True)) for row in rows]
                self._trained[variant.name] = _Fit(strategy, self._workload, together, compiled=compiled)
            else:
                self._trained[variant.name] = _Step(strategy, self._workload, batches, compiled=compiled)
        return {
            "sizes": sorted(int(np.prod(v.shape)) for v in self._workload.build().trainable_variables),
            "versions": {name: version(name) for name in ("tensorflow", "keras", "numpy")},
        }

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Runs steps; `stated` is the difference of `strategy.communication`, if the strategy has it."""
        trained = self._trained[variant]
        if not hasattr(trained.strategy, "communication"):
            return {"seconds": trained.take(steps), "stated": None}
        before = trained.strategy.communication
        seconds = trained.take(steps)
        return {"seconds": seconds, "stated": asdict(trained.strategy.communication - before)}

    def held_bytes(self, variant: str) -> dict[str, int]:
        """Returns `value`: the size of the optimizer's slots that this worker holds."""
        held = 0
        for slot in self._trained[variant].optimizer.variables:
            parts = slot.parts if hasattr(slot, "parts") else [slot]
            held += sum(4 * int(np.prod(part.shape)) for part in parts)
        return {"value": held}

    def fingerprint(self, variant: str) -> dict[str, float]:
        """Returns the sum of the weights' absolute values."""
        weights = self._trained[variant].model.trainable_variables
        return {"value": float(sum(np.abs(np.asarray(v)).sum(dtype=np.float64) for v in weights))}


def _strategy_of(variant: variants.Variant) -> Any:
    import tensorflow as tf

    from tfdist.strategies import MultiWorkerMirroredStrategy, ShardedState

    if variant.reduction == variants.FLOOR:
        return tf.distribute.get_strategy()
    if variant.reduction == variants.STOCK:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if variant.reduction == variants.SHARDED:
        # "weights" sends those in bfloat16, "bf16" gradients, too.
        state = ShardedState(weights_dtype="bfloat16" if variant.compression else None)
        method = variant.compression if variant.compression != "weights" else None
        return MultiWorkerMirroredStrategy(shard_optimizer_state=state, compression=method)
    if variant.compression is None:
        return MultiWorkerMirroredStrategy()
    return MultiWorkerMirroredStrategy(compression=variant.compression)


if __name__ == "__main__":
    serve(TensorFlowWorker)
