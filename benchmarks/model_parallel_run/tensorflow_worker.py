"""The TensorFlow processes: a server for each stage, and the chief, which trains."""

import contextlib
import time
from importlib.metadata import version
from typing import Any

import numpy as np
from network_run.worker import TENSORFLOW_PORT, WorkerSpec, serve

from model_parallel_run.pipeline_variants import (
    BATCHES,
    BY_NAME,
    LEARNING_RATE,
    MICRO_BATCHES,
    TENSOR,
    WORKLOADS,
    Variant,
)
from model_parallel_run.stage_worker import StageWorker

_CHIEF_PORT = TENSORFLOW_PORT + 100
# One more than the core needs: these threads also answer the other workers. PyTorch's gloo has threads for that.
_INTRA_OP_THREADS, _INTER_OP_THREADS = 1, 2


def _cluster(spec: WorkerSpec) -> dict[str, list[str]]:
    return {
        "worker": [f"{address}:{TENSORFLOW_PORT}" for address in spec.addresses],
        "chief": [f"{spec.addresses[0]}:{_CHIEF_PORT}"],
    }


class StageServer(StageWorker):
    """A TensorFlow server with one CPU device, on which the chief places a stage."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Starts the server."""
        super().__init__(spec)
        import tensorflow as tf

        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=_INTRA_OP_THREADS, inter_op_parallelism_threads=_INTER_OP_THREADS
        )
        cluster = tf.train.ClusterSpec(_cluster(spec))
        self._server = tf.distribute.Server(cluster, job_name="worker", task_index=spec.rank, config=config)

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates nothing: the chief does."""
        return {}

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Returns at once: the chief runs the steps."""
        return self.nothing


class Chief(StageWorker):
    """Trains models by `fit`, on the servers of the stages or in its own process.

    It runs in the namespace and on the core of stage 0, whose server counts what that namespace sends.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Connects to the servers."""
        super().__init__(spec)
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(_INTRA_OP_THREADS)
        tf.config.threading.set_inter_op_parallelism_threads(_INTER_OP_THREADS)
        cluster = tf.train.ClusterSpec(_cluster(spec))
        tf.config.experimental_connect_to_cluster(cluster, job_name="chief", task_index=0)
        self._devices = [f"/job:worker/task:{rank}/device:CPU:0" for rank in range(spec.workers)]
        self._workload = WORKLOADS[spec.workload]
        self._trained: dict[str, Any] = {}

    def count(self) -> dict[str, int]:
        """Returns zeros."""
        return {"bytes": 0, "packets": 0}

    def transfer(self, sender: int, receiver: int, size: int) -> dict[str, float]:
        """Leaves the transfer to the servers."""
        return {}

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates and compiles the models."""
        self._trained = {name: self._compiled(BY_NAME[name]) for name in names}
        variables = next(iter(self._trained.values())).trainable_variables
        return {
            "sizes": sorted(int(np.prod(variable.shape)) for variable in variables),
            "versions": {name: version(name) for name in ("tensorflow", "keras", "numpy")},
        }

    def _compiled(self, variant: Variant) -> Any:
        import keras

        from model_parallel_run.keras_models import build_model, tensor_layout
        from tfdist.strategies import ModelParallelStrategy, Pipeline

        scope: Any = contextlib.nullcontext()
        if variant.schedule == TENSOR:
            layout = tensor_layout([f"device:{index}" for index in range(self._workload.ways)])
            pipeline = Pipeline(stages=1, micro_batches=1)
            scope = ModelParallelStrategy(self._devices, pipeline=pipeline, layout_map=layout).scope()
        elif variant.schedule:
            pipeline = Pipeline(
                stages=len(self._devices),
                micro_batches=MICRO_BATCHES,
                schedule=variant.schedule,
                cuts=self._workload.cuts,
            )
            scope = ModelParallelStrategy(self._devices, pipeline=pipeline).scope()
        keras.utils.set_random_seed(0)
        with scope:
            model = build_model(self.spec.workload)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(LEARNING_RATE), loss)
        return model

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Runs steps of `fit`; a step is timed from the end of the previous step to its end."""
        import keras

        ends: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: ends.append(time.perf_counter()),
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
        )
        fitted = self._trained[variant].fit(self._data(), steps_per_epoch=steps, verbose=0, callbacks=[note])
        return {"seconds": np.diff(ends).tolist(), "stated": None, "loss": fitted.history["loss"][-1]}

    def _data(self) -> Any:
        import tensorflow as tf

        batches = [self._workload.batch(index) for index in range(BATCHES)]
        inputs, labels = (np.stack(part) for part in zip(*batches, strict=True))
        return tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat()


if __name__ == "__main__":
    serve(lambda spec: StageServer(spec) if spec.rank < spec.workers else Chief(spec))
