"""Times steps of `fit` under several strategies and models in turns: the program of the kit's speed cases.

Started by `gpu_run.speed_cases`, for several workers through `tfdist run`.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_run.gpu_machine import divide_device

_MEGABYTES_OF_A_LOGICAL_GPU = 8192
_TINY_BATCH, _TINY_FEATURES, _TINY_WIDTH = 32, 64, 300  # 20,000 parameters


def main() -> int:
    """Trains all variants in turns, and writes the milliseconds of a step of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variants", required=True, help="as `model:strategy[:method][+xla|+loop]`, with commas")
    parser.add_argument("--kind", required=True, choices=("CPU", "GPU"), help="the devices that compute")
    parser.add_argument("--logical", type=int, default=1, help="logical devices of this process")
    parser.add_argument("--sizes", required=True, help="JSON: features, width, side, batch (of all replicas)")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    divide_device(options.kind, options.logical, _MEGABYTES_OF_A_LOGICAL_GPU)
    sizes = json.loads(options.sizes)
    strategies: dict[str, Any] = {}
    names = options.variants.split(",")
    trained = {name: (_Loop if name.endswith("+loop") else _Fit)(name, sizes, options, strategies) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    for turn in range(options.rounds + 1):
        for name, one in trained.items():
            taken = one.seconds_of_a_step(options.steps)
            if turn:  # the first turn traces and compiles
                seconds[name].append(taken)
    if all(getattr(strategy, "rank", 0) == 0 for strategy in strategies.values() if strategy) and _is_first():
        ms = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
        parameters = {name: one.model.count_params() for name, one in trained.items()}
        devices = {name: str(one.model.trainable_variables[0].value.device) for name, one in trained.items()}
        options.output.write_text(json.dumps({"ms": ms, "parameters": parameters, "devices": devices}))
    return 0


def _is_first() -> bool:
    import tensorflow as tf

    return not (tf.distribute.cluster_resolver.TFConfigClusterResolver().task_id or 0)


class _Fit:
    """A model under a strategy, trained by `fit`."""

    def __init__(self, name: str, sizes: dict[str, int], options: Any, strategies: dict[str, Any]) -> None:
        import keras
        import numpy as np

        kind, _, rest = name.partition(":")
        strategy_name, _, flag = rest.partition("+")
        if strategy_name not in strategies:
            strategies[strategy_name] = _strategy(strategy_name, options)
        self.strategy, random = strategies[strategy_name], np.random.default_rng(0)
        layers, shape, batch = _MODELS[kind](sizes)
        with self.strategy.scope() if self.strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(1)
            self.model = keras.Sequential([keras.Input(shape), *layers])
            self.optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
            self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(self.optimizer, self.loss, jit_compile=flag == "xla")
            self.optimizer.build(self.model.trainable_variables)
        self.inputs = random.normal(size=(batch, *shape)).astype("float32")
        self.labels = random.integers(0, 10, size=batch).astype("int32")

    def seconds_of_a_step(self, steps: int) -> float:
        """Trains for some steps after one that is not timed."""
        import keras
        import tensorflow as tf

        class Clock(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                if batch == 0:
                    tf.test.experimental.sync_devices()
                    self.began = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                tf.test.experimental.sync_devices()
                self.seconds = time.perf_counter() - self.began

        data = tf.data.Dataset.from_tensors((self.inputs, self.labels)).repeat(steps + 1)
        clock = Clock()
        self.model.fit(data, verbose=0, shuffle=False, callbacks=[clock])
        return clock.seconds / steps


class _Loop(_Fit):
    """The same in a loop: under TensorFlow's own strategy `fit` of Keras 3 fails with several workers."""

    _step: Any = None

    def seconds_of_a_step(self, steps: int) -> float:
        """Trains for some steps after one that is not timed."""
        import tensorflow as tf

        if self._step is None:
            self._step = self._traced_step()
        rows = len(self.inputs) // self.strategy.num_replicas_in_sync
        with tf.device("CPU:0"):
            batch = tf.constant(self.inputs[:rows]), tf.constant(self.labels[:rows])
        self._step(*batch)
        self._synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self._step(*batch)
        self._synchronize()
        return (time.perf_counter() - began) / steps

    def _synchronize(self) -> None:
        """Waits for the kernels: the last variable is short. `sync_devices` fails with several tasks."""
        self.model.trainable_variables[-1].numpy()

    def _traced_step(self) -> Any:
        import tensorflow as tf

        replicas = self.strategy.num_replicas_in_sync

        def replica_step(inputs: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss(labels, self.model(inputs, training=True)) / replicas
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss

        return tf.function(lambda *batch: self.strategy.run(replica_step, args=batch), autograph=False)


def _mlp(sizes: dict[str, int]) -> tuple[list[Any], tuple[int, ...], int]:
    import keras

    hidden = [keras.layers.Dense(sizes["width"], "relu") for _ in range(3)]
    return [*hidden, keras.layers.Dense(10)], (sizes["features"],), sizes["batch"]


def _cnn(sizes: dict[str, int]) -> tuple[list[Any], tuple[int, ...], int]:
    import keras

    layers: list[Any] = [
        keras.layers.Conv2D(filters, 3, strides=strides, padding="same", activation="relu")
        for filters, strides in ((32, 1), (64, 2), (128, 2))
    ]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    return layers, (sizes["side"], sizes["side"], 3), sizes["batch"]


def _tiny(sizes: dict[str, int]) -> tuple[list[Any], tuple[int, ...], int]:
    import keras

    layers = [keras.layers.Dense(_TINY_WIDTH, "tanh"), keras.layers.Dense(10)]
    return layers, (_TINY_FEATURES,), _TINY_BATCH


_MODELS: dict[str, Callable[..., tuple[list[Any], tuple[int, ...], int]]] = {"mlp": _mlp, "cnn": _cnn, "tiny": _tiny}


def _strategy(name: str, options: Any) -> Any:
    """Returns the strategy of a name: "none", or "stock" or "tfdist", "-replicas" or "-workers", and a method."""
    import tensorflow as tf

    kind, _, method = name.partition(":")
    devices = [f"{options.kind}:{index}" for index in range(options.logical)]
    if kind == "none":
        return None
    if kind == "stock-replicas":
        return tf.distribute.MirroredStrategy(devices)
    if kind == "stock-workers":
        communication = tf.distribute.experimental
        ring = communication.CommunicationImplementation.RING
        return tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=communication.CommunicationOptions(implementation=ring)
        )
    from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

    if kind == "tfdist-replicas":
        return MirroredStrategy(devices, compression=method or None)
    return MultiWorkerMirroredStrategy(compression=method or None, elastic=kind == "tfdist-elastic-workers")


if __name__ == "__main__":
    sys.exit(main())
