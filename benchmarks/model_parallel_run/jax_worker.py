"""A worker that trains with Keras' ModelParallel on JAX, with gloo."""

import functools
import itertools
import time
from importlib.metadata import version
from typing import Any

import jax
import keras
import numpy as np
from jax._src.lib import _jax
from network_run.links import INTERFACE
from network_run.worker import JAX_PORT, WorkerSpec, serve

from model_parallel_run.keras_models import build_model, tensor_layout
from model_parallel_run.pipeline_variants import BATCHES, LEARNING_RATE, WORKLOADS
from model_parallel_run.stage_worker import StageWorker


class JaxWorker(StageWorker):
    """Holds its parts of the model's variables; all workers draw the same batches."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Connects to the other workers. JAX must not be initialized before."""
        super().__init__(spec)
        # By default gloo listens at the address of the host's name, which is not in the worker's namespace.
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, interface=INTERFACE)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"{spec.addresses[0]}:{JAX_PORT}", spec.workers, spec.rank)
        batches = [WORKLOADS[spec.workload].batch(index) for index in range(BATCHES)]
        # Keras accepts a generator, but no other iterator.
        self._data = (batch for batch in itertools.cycle(batches))
        self._model: Any = None

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates and compiles the model."""
        layout = tensor_layout(keras.distribution.list_devices("cpu"))
        distribution = keras.distribution.ModelParallel(layout_map=layout, auto_shard_dataset=False)
        keras.distribution.set_distribution(distribution)
        keras.utils.set_random_seed(0)
        self._model = build_model(self.spec.workload)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(keras.optimizers.Adam(LEARNING_RATE), loss)
        return {
            "sizes": sorted(int(np.prod(variable.shape)) for variable in self._model.trainable_variables),
            "versions": {"jax": version("jax"), "keras on jax": version("keras")},
        }

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Runs steps of `fit`; a step is timed from the end of the previous step to its end."""
        ends: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: ends.append(time.perf_counter()),
            # Keras has read the loss for `logs`, so the step has ended.
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
        )
        fitted = self._model.fit(self._data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[note])
        return {"seconds": np.diff(ends).tolist(), "stated": None, "loss": fitted.history["loss"][-1]}


if __name__ == "__main__":
    serve(JaxWorker)
