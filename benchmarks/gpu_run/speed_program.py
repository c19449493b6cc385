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

_MEGABYTES_OF_A_LOGICAL_GPU = 8192
_TINY_BATCH, _TINY_FEATURES, _TINY_WIDTH = 32, 64, 300  # 20,000 parameters


def main() -> int:
    """Trains all variants in turns, and writes the milliseconds of a step of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variants", required=True, help="as `model:strategy[:method]`, separated by commas")
    parser.add_argument("--kind", required=True, choices=("CPU", "GPU"), help="the devices that compute")
    parser.add_argument("--logical", type=int, default=1, help="logical devices of this process")
    parser.add_argument("--sizes", required=True, help="JSON: features, width, side, batch (of all replicas)")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    import tensorflow as tf

    found = tf.config.list_physical_devices(options.kind)
    if not found:
        raise SystemExit(f"Error: TensorFlow sees no {options.kind}. It sees: {tf.config.list_physical_devices()}")
    if options.logical > 1:
        limit = _MEGABYTES_OF_A_LOGICAL_GPU if options.kind == "GPU" else None
        parts = [tf.config.LogicalDeviceConfiguration(memory_limit=limit)] * options.logical
        tf.config.set_logical_device_configuration(found[0], parts)
    sizes = json.loads(options.sizes)
    strategies: dict[str, Any] = {}
    trained = {name: _Trained(name, sizes, options, strategies) for name in options.variants.split(",")}
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


class _Trained:
    """A model under a strategy."""

    def __init__(self, name: str, sizes: dict[str, int], options: Any, strategies: dict[str, Any]) -> None:
        kind, _, strategy_name = name.partition(":")
        strategy_name, _, flag = strategy_name.partition("+")  # "+xla"
        if strategy_name not in strategies:
            strategies[strategy_name] = _strategy(strategy_name, options)
        self._strategy = strategies[strategy_name]

        import keras
        import numpy as np

        random = np.random.default_rng(0)
        layers, shape, batch = _MODELS[kind](sizes)
        with self._strategy.scope() if self._strategy else contextlib.nullcontext():
            keras.utils.set_random_seed(1)
            self.model = keras.Sequential([keras.Input(shape), *layers])
            self.model.compile(
                keras.optimizers.SGD(1e-3, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=flag == "xla",
            )
        self._inputs = random.normal(size=(batch, *shape)).astype("float32")
        self._labels = random.integers(0, 10, size=batch).astype("int32")
        self._is_stock = strategy_name.startswith("stock")

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

        data = tf.data.Dataset.from_tensors((self._inputs, self._labels))
        # TensorFlow gives each worker batches of its own, so that a number of batches does not divide evenly.
        data = data.repeat() if self._is_stock else data.repeat(steps + 1)
        clock, limit = Clock(), steps + 1 if self._is_stock else None
        self.model.fit(data, steps_per_epoch=limit, verbose=0, shuffle=False, callbacks=[clock])
        return clock.seconds / steps


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
    return MultiWorkerMirroredStrategy(compression=method or None)


if __name__ == "__main__":
    sys.exit(main())
