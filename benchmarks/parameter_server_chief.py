"""The chief of a cluster of `parameter_server_throughput.py`; runs the methods that its standard input names."""

import json
import sys
import time
from typing import Any

BATCH = 32
WORKERS = 3
# Units of the hidden layers; steps of a block with pushes, and with rounds.
MODELS = {"small": ([64], 300, 100), "large": ([1024, 512], 150, 50)}
ROUNDS = ("synchronous", "backup worker")
_ACCURACY_STEPS = 1350  # batches of all workers: 30 times the training images


def sleeping_batches(images: Any, labels: Any) -> Any:
    """Batches, repeated indefinitely; a worker sleeps before each for the microseconds in the file `sleep`."""
    import tensorflow as tf

    def slept(*batch: Any) -> Any:
        dataset = tf.data.Dataset.from_tensors(batch)
        types, shapes = [x.dtype for x in batch], [x.shape for x in batch]
        # The name is not constant; otherwise TensorFlow would read the file once and treat its content as constant.
        nothing = tf.strings.substr(tf.strings.as_string(batch[1][0]), 0, 0)
        sleep = tf.strings.to_number(tf.io.read_file("sleep" + nothing), tf.int64)
        variant = tf.raw_ops.SleepDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            sleep_microseconds=sleep // 2,  # it sleeps before the batch and before the end of the dataset
            output_types=types,
            output_shapes=shapes,
        )
        return tf.data.experimental.from_variant(variant, dataset.element_spec)

    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images)).repeat()
    # No prefetch: batches that a worker made before it became slow would hide that it is slow.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.autotune.enabled = False
    return data.batch(BATCH, drop_remainder=True).flat_map(slept).repeat().with_options(options)


def digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns images and labels for training, and every fifth for testing."""
    import numpy as np
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = (data.data / 16).astype("float32"), data.target.astype("int32")
    held_out = np.arange(len(labels)) % 5 == 4
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


class Chief:
    """Trains under one variant."""

    def __init__(self, variant: str) -> None:
        """Connects to the cluster of TF_CONFIG."""
        import tensorflow as tf

        self.rounds = variant in ROUNDS
        if variant == "tf_keras":
            import tf_keras

            self.keras: Any = tf_keras
            resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
            self.strategy: Any = tf.distribute.ParameterServerStrategy(resolver)
        else:
            import keras

            from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

            self.keras = keras
            mode = Synchronous(int(variant == "backup worker")) if self.rounds else Asynchronous()
            self.strategy = ParameterServerStrategy(mode=mode)
        self.train, self.held_out = digits()
        self.data = self._data()
        self.models = {name: self._model(layers, 0) for name, (layers, *_) in MODELS.items()}

    def rate(self, model: str, steps: int) -> float:
        """Returns the updates per second of `model.fit`, from the start of its epoch to the last update."""
        begin: list[float] = []
        end: list[float] = []
        clock = self.keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda *_: begin.append(time.perf_counter()),
            on_epoch_end=lambda *_: end.append(time.perf_counter()),
        )
        before = self._updates(model)
        self._fit(self.models[model], steps, [clock])
        made = self._updates(model) - before
        if made < steps:
            raise RuntimeError(f"Some updates were lost. Received: {made}. Expected: {steps}.")
        return steps / (end[0] - begin[0])

    def accuracy(self, seed: int) -> float:
        """Returns the held-out accuracy of a new model after as many samples as in the other variants."""
        import numpy as np

        model = self._model(MODELS["small"][0], seed)
        self._fit(model, _ACCURACY_STEPS // (WORKERS if self.rounds else 1), [])
        images, labels = self.held_out
        for layer in range(len(model.layers)):
            weights, bias = (np.asarray(value) for value in model.get_weights()[2 * layer : 2 * layer + 2])
            images = images @ weights + bias
            images = np.maximum(images, 0) if layer + 1 < len(model.layers) else images
        return float(np.mean(images.argmax(-1) == labels))

    def _updates(self, model: str) -> int:
        return int(self.models[model].optimizer.iterations.numpy())

    def _fit(self, model: Any, steps: int, callbacks: list[Any]) -> None:
        model.fit(self.data, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=callbacks)

    def _data(self) -> Any:
        # Different on each worker, as each shuffles itself.
        if self.keras.__name__ == "tf_keras":
            return self.keras.utils.experimental.DatasetCreator(lambda _: sleeping_batches(*self.train))
        return self.strategy.distribute_datasets_from_function(lambda _: sleeping_batches(*self.train))

    def _model(self, layers: list[int], seed: int) -> Any:
        self.keras.utils.set_random_seed(seed)
        with self.strategy.scope():
            hidden = [self.keras.layers.Dense(units, activation="relu") for units in layers]
            model = self.keras.Sequential([self.keras.Input((64,)), *hidden, self.keras.layers.Dense(10)])
            loss = self.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            rate = 1e-3 * (WORKERS if self.rounds else 1)  # proportional to the batch of an update
            model.compile(self.keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
        return model


def serve(variant: str) -> None:
    """Runs the chief: reads lines of JSON lists (method, arguments), writes a line with each result."""
    answers, sys.stdout = sys.stdout, sys.stderr
    chief = Chief(variant)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(chief, method)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
