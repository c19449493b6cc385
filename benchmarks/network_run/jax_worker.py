"""A worker that trains with Keras on JAX: without gradient exchange, and with Keras' DataParallel on gloo."""

import contextlib
import functools
import itertools
import time
from importlib.metadata import version
from typing import Any

import jax
import keras
import numpy as np
from jax._src.lib import _jax
from workloads import WORKLOADS, Workload

from network_run import variants
from network_run.links import INTERFACE
from network_run.worker import JAX_PORT, Worker, WorkerSpec, serve

_LEARNING_RATE = 1e-3


class _Fit:
    """A model that trains by `model.fit`; a step is timed from the end of the previous step to its end."""

    def __init__(self, variant: variants.Variant, workload: Workload, batches: Any) -> None:
        keras.utils.set_random_seed(0)
        # Keras reads the distribution also while it trains. Without one, it uses this process's device only.
        self._scope: Any = contextlib.nullcontext
        if variant.sends:
            self._scope = keras.distribution.DataParallel(auto_shard_dataset=False).scope
        with self._scope():
            self.model = workload.build()
            self.model.compile(
                keras.optimizers.Adam(_LEARNING_RATE),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        # Keras accepts a generator, but no other iterator.
        self._data = (batch for batch in itertools.cycle(batches))

    def take(self, steps: int) -> list[float]:
        ends: list[float] = []
        note = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: ends.append(time.perf_counter()),
            # Keras has read the loss for `logs`, so the step has ended.
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()),
        )
        with self._scope():
            self.model.fit(self._data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[note])
        return np.diff(ends).tolist()


class JaxWorker(Worker):
    """Holds all JAX variants in one process, with one client of JAX's coordination service."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Connects to the other workers. JAX must not be initialized before."""
        super().__init__(spec)
        # By default gloo listens at the address of the host's name, which is not in the worker's namespace.
        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, interface=INTERFACE)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"{spec.addresses[0]}:{JAX_PORT}", spec.workers, spec.rank)
        with np.load(spec.batches_file) as stored:
            self._batches = list(zip(stored["inputs"], stored["labels"], strict=True))
        self._workload = WORKLOADS[spec.workload]
        self._trained: dict[str, _Fit] = {}

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates the models."""
        self._trained = {name: _Fit(variants.BY_NAME[name], self._workload, self._batches) for name in names}
        return {
            "sizes": sorted(int(np.prod(v.shape)) for v in self._workload.build().trainable_variables),
            "versions": {"jax": version("jax"), "keras on jax": version("keras")},
        }

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Runs steps; JAX reports no traffic."""
        return {"seconds": self._trained[variant].take(steps), "stated": None}

    def fingerprint(self, variant: str) -> dict[str, float]:
        """Returns the sum of the weights' absolute values."""
        weights = self._trained[variant].model.trainable_variables
        return {"value": float(sum(np.abs(np.asarray(v.value)).sum(dtype=np.float64) for v in weights))}


if __name__ == "__main__":
    serve(JaxWorker)
