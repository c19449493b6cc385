"""Measures what sharded optimizer state costs and saves, against whole state: step times, bytes, slots of a replica.

    tfdist run --workers 2 benchmarks/sharded_state.py

The model is an MLP of 1.9 million parameters with Adam, 64 samples for each replica. Epochs of both kinds alternate, so
that both meet the same state of the machine. The chief prints a table.
"""

import time
from typing import Any

import keras
import numpy as np

from tfdist.strategies import MultiWorkerMirroredStrategy

SAMPLES_OF_A_REPLICA, STEPS, EPOCHS = 64, 20, 6
KINDS = {"whole": False, "sharded": True}


class StepTimes(keras.callbacks.Callback):
    """Times the steps of an epoch in seconds, without the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch > 1:
            self.seconds.append(time.perf_counter() - self._began)


def compiled(strategy: MultiWorkerMirroredStrategy) -> keras.Model:
    """Returns the model."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss=loss)
    return model


def held_bytes(model: keras.Model) -> int:
    """Returns the size of the slots that the first replica of this worker holds."""
    slots = [v for v in model.optimizer.variables if v.shape.rank and "learning_rate" not in v.name]
    return sum(4 * int(np.prod(slot.parts[0].shape if hasattr(slot, "parts") else slot.shape)) for slot in slots)


def main() -> None:
    """Trains both kinds in turn and prints the table on the chief."""
    strategies = {kind: MultiWorkerMirroredStrategy(shard_optimizer_state=shards) for kind, shards in KINDS.items()}
    batch = SAMPLES_OF_A_REPLICA * strategies["whole"].num_replicas_in_sync
    random = np.random.default_rng(0)
    inputs = random.normal(size=(batch * STEPS, 784)).astype("float32")
    labels = random.integers(0, 10, size=batch * STEPS)
    models = {kind: compiled(strategy) for kind, strategy in strategies.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for epoch in range(EPOCHS):
        for kind, model in models.items():
            times = StepTimes()
            model.fit(inputs, labels, batch_size=batch, verbose=0, callbacks=[times])
            if epoch:
                seconds[kind] += times.seconds
    if strategies["whole"].rank:
        return
    print("| state | median step | fastest tenth | sent in a step | slots of a replica |\n|---|---|---|---|---|")
    for kind, strategy in strategies.items():
        fast, median = (1000 * np.percentile(seconds[kind], part) for part in (10, 50))
        sent = strategy.communication.wire_bytes / strategy.communication.updates
        slots = held_bytes(models[kind])
        print(f"| {kind} | {median:.1f} ms | {fast:.1f} ms | {sent / 1e6:.3f} MB | {slots / 1e6:.2f} MB |", flush=True)


if __name__ == "__main__":
    main()
