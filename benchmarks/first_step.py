"""Measures the first step of `fit`: tracing, TensorFlow's optimization of the graph, and one computation.

    python benchmarks/first_step.py                           all models, three processes of each kind
    python benchmarks/first_step.py --models gan --repeats 1  this one, once

Each measurement is a new process, as TensorFlow keeps what it has traced; the kinds alternate. All train on the same
global batches, whose size is unknown while tracing, as `fit` makes them of arrays. Counts the operations of the step's
function, with all functions that it calls, its traces, and the updates in them. Writes
`benchmarks/results/first_step.json`, and prints a table of medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "results" / "first_step.json"
_COMMAND = [sys.executable]
MODELS = ("cnn", "text", "gan")
ONE_PROCESS, TFDIST, STOCK = "one process", "tfdist", "stock"
KINDS = (ONE_PROCESS, TFDIST, STOCK)
_BATCH_SIZE = 32  # of all replicas
_LATENT = 64


def observed_adam() -> Any:
    """Returns an Adam that remembers the graphs in which it updates."""
    import keras
    import tensorflow as tf

    class ObservedAdam(keras.optimizers.Adam):
        graphs: list[tf.Graph]

        def apply(self, *args: Any, **kwargs: Any) -> None:
            self.graphs.append(tf.compat.v1.get_default_graph())
            super().apply(*args, **kwargs)

    optimizer = ObservedAdam(1e-3)
    optimizer.graphs = []
    return optimizer


def build_gan() -> Any:
    """Builds a GAN after DCGAN (Radford et al. 2016) with two optimizers, as in Keras' guide of custom steps."""
    import keras
    import tensorflow as tf
    from keras import layers

    def leaky(layer: Any) -> list[Any]:
        return [layer, layers.LeakyReLU(0.2)]

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.discriminator = keras.Sequential(
                [
                    keras.Input((32, 32, 3)),
                    *leaky(layers.Conv2D(32, 4, 2, "same")),
                    *leaky(layers.Conv2D(64, 4, 2, "same")),
                    *leaky(layers.Conv2D(64, 4, 2, "same")),
                    layers.Flatten(),
                    layers.Dropout(0.2),
                    layers.Dense(1, "sigmoid"),
                ]
            )
            self.generator = keras.Sequential(
                [
                    keras.Input((_LATENT,)),
                    layers.Dense(4 * 4 * 64),
                    layers.Reshape((4, 4, 64)),
                    *leaky(layers.Conv2DTranspose(64, 4, 2, "same")),
                    *leaky(layers.Conv2DTranspose(64, 4, 2, "same")),
                    *leaky(layers.Conv2DTranspose(32, 4, 2, "same")),
                    layers.Conv2D(3, 5, padding="same", activation="sigmoid"),
                ]
            )
            self.seed_generator = keras.random.SeedGenerator(1)

        def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
            super().compile(jit_compile=False)
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
            self.loss_of = keras.losses.BinaryCrossentropy()
            self.d_loss = keras.metrics.Mean(name="d_loss")
            self.g_loss = keras.metrics.Mean(name="g_loss")

        @property
        def metrics(self) -> list[Any]:
            return [self.d_loss, self.g_loss]

        def train_step(self, images: Any) -> dict[str, Any]:
            count = tf.shape(images)[0]
            noise = keras.random.normal((count, _LATENT), seed=self.seed_generator)
            both = tf.concat([self.generator(noise), images], axis=0)
            labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
            labels += 0.05 * keras.random.uniform(tf.shape(labels), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                d_loss = self.loss_of(labels, self.discriminator(both, training=True))
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
            noise = keras.random.normal((count, _LATENT), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                g_loss = self.loss_of(tf.zeros((count, 1)), self.discriminator(self.generator(noise), training=True))
            weights = self.generator.trainable_weights
            self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
            self.d_loss.update_state(d_loss)
            self.g_loss.update_state(g_loss)
            return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    return Gan()


def training(model: str, kind: str) -> tuple[Any, Any, Any]:
    """Returns a compiled model, its global batches, and the optimizer that is observed."""
    import keras
    import numpy as np
    import tensorflow as tf
    from workloads import WORKLOADS

    keras.utils.set_random_seed(1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = ["CPU:0", "CPU:1"]
    if kind == TFDIST:
        from tfdist.strategies import MirroredStrategy

        strategy = MirroredStrategy(devices)
    else:
        strategy = tf.distribute.MirroredStrategy(devices) if kind == STOCK else tf.distribute.get_strategy()
    with strategy.scope():
        optimizer = observed_adam()
        if model == "gan":
            arrays: Any = np.random.default_rng(1).random((_BATCH_SIZE, 32, 32, 3), "float32")
            built = build_gan()
            built.compile(optimizer, keras.optimizers.Adam(1e-3))
        else:
            batches = [WORKLOADS[model].batch(index) for index in range(_BATCH_SIZE // WORKLOADS[model].batch_size)]
            arrays = tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))
            built = WORKLOADS[model].build()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            built.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return built, tf.data.Dataset.from_tensor_slices(arrays).batch(_BATCH_SIZE), optimizer


def count_operations(graph: Any) -> int:
    """Returns the number of operations of a graph and of the functions that it calls, also indirectly."""
    return len(graph.get_operations()) + sum(len(f.node_def) for f in graph.as_graph_def().library.function)


def measure(model: str, kind: str) -> dict[str, float]:
    """Trains one step in this process; returns its seconds, and what its function contains."""
    built, data, optimizer = training(model, kind)
    start = time.perf_counter()
    built.fit(data, steps_per_epoch=1, verbose=0)
    seconds = time.perf_counter() - start
    graphs = list(dict.fromkeys(optimizer.graphs))
    return {
        "seconds": seconds,
        "operations": count_operations(graphs[-1]),
        "traces": len(graphs),
        "updates": len(optimizer.graphs),
    }


def measure_all(models: list[str], repeats: int) -> Iterator[tuple[str, str, dict[str, float] | None]]:
    """Measures in new processes; yields the model, the kind, and what was measured, `None` if it has failed."""
    environment = os.environ | {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    for _ in range(repeats):
        for model in models:
            for kind in KINDS:
                command = [*_COMMAND, __file__, "--measure", model, kind]
                ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
                yield model, kind, None if ended.returncode else json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "KIND"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(*chosen.measure)))
        return
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for model, kind, measured in measure_all(chosen.models, chosen.repeats):
        if measured is not None:
            found.setdefault(model, {}).setdefault(kind, []).append(measured)
    results = {
        model: {
            kind: {key: statistics.median(one[key] for one in measured) for key in measured[0]}
            for kind, measured in of_model.items()
        }
        for model, of_model in found.items()
    }
    rows = [["model", "kind", "seconds", "ratio", "operations", "ratio", "traces", "updates"]]
    for model, kinds in results.items():
        for kind, own in kinds.items():
            one = kinds[ONE_PROCESS]
            ratios = {key: f"{own[key] / one[key]:.2f}" for key in ("seconds", "operations")}
            numbers = [f"{own['seconds']:.2f}", ratios["seconds"], f"{own['operations']:.0f}", ratios["operations"]]
            rows.append([model, kind, *numbers, f"{own['traces']:.0f}", f"{own['updates']:.0f}"])
    _FILE.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join("  ".join(f"{cell:>11}" for cell in row) for row in rows))


if __name__ == "__main__":
    main()
