"""Variables of all dtypes on workers, and models that have them.

The program of the workers in `test_dtypes_on_workers.py`.
"""

import contextlib
import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import MultiWorkerMirroredStrategy

INTEGERS = "int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64".split()
FLOATS = "float8_e4m3fn float8_e5m2 bfloat16 float16 float32 float64".split()
DTYPES = (*INTEGERS, *FLOATS, "complex64", "complex128")
SHAPES = ((), (2, 3), (0, 2))
_random = np.random.default_rng(5)
INPUTS = _random.normal(size=(48, 6)).astype("float32")
TOKENS = _random.integers(0, 9, size=(48, 3)).astype("int32")
TARGETS = _random.normal(size=(48, 3)).astype("float32")


def value(dtype, number, shape=()):
    """Small whole numbers, exact in each dtype."""
    numbers = tf.constant(np.arange(int(np.prod(shape, dtype=int))).reshape(shape) % 2 + number)
    return tf.cast(tf.cast(numbers, tf.int8 if dtype in INTEGERS else tf.float32), dtype)


def bits(tensor):
    """The bytes of a value, as they are written to JSON."""
    return tf.convert_to_tensor(tensor).numpy().tobytes().hex()


def variables(strategy):
    """For each dtype and shape the bits of the copies of a variable, and of the initial value of the chief."""
    found = {}
    for dtype in (*DTYPES, "bool"):
        for shape in SHAPES:
            own = value(dtype, 1 - strategy.rank, shape)
            with strategy.scope():
                variable = tf.Variable(own)
            copies = [bits(one.read_value()) for one in strategy.experimental_local_results(variable)]
            found[f"{dtype} {shape}"] = copies, bits(value(dtype, 1, shape))
    return found


def exchanges(strategy):
    """For each dtype the bits of a sum over the replicas and of what they gather, and those that are right."""

    def step():
        replica = tf.distribute.get_replica_context()
        own = {dtype: value(dtype, 1, (1, 3)) for dtype in DTYPES}
        return {one: (replica.all_reduce("SUM", own[one]), replica.all_gather(own[one], axis=0)) for one in DTYPES}

    results = tf.function(lambda: strategy.run(step), autograph=False)()
    replicas, found = strategy.num_replicas_in_sync, {}
    for dtype, pair in results.items():
        summed, gathered = (bits(strategy.experimental_local_results(one)[0]) for one in pair)
        total = tf.cast(replicas * np.array([[1, 2, 1]]), tf.int8 if dtype in INTEGERS else tf.float32)
        found[dtype] = (summed, gathered), (bits(tf.cast(total, dtype)), bits(value(dtype, 1, (1, 3))) * replicas)
    return found


def pure_bfloat16(strategy, callbacks=()):
    """Dense and sparse gradients, slots and metrics of bfloat16."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        policy = keras.DTypePolicy("bfloat16")
        tokens = keras.Input((3,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(9, 4, dtype=policy)(tokens))
        model = keras.Model(tokens, keras.layers.Dense(3, dtype=policy)(hidden))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return trained(model, TOKENS, callbacks)


def quantized(strategy, mode, callbacks=()):
    """A model that is trained, quantized, and trained on by LoRA."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
        model.quantize(mode)
        if mode != "float8":
            for layer in model.layers:
                layer.enable_lora(2)
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return trained(model, INPUTS, callbacks)


class Counts(keras.layers.Layer):
    """Counts its calls in integers of one byte."""

    def build(self, shape):
        self.counts = [
            self.add_weight(name=dtype, shape=[2], initializer="zeros", dtype=dtype, trainable=False)
            for dtype in ("uint8", "int8")
        ]

    def call(self, inputs, training=False):
        for count in self.counts if training else ():
            count.assign(count + keras.ops.cast([1, 2], count.dtype))
        return inputs


def counting(strategy, callbacks=()):
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), Counts(), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return trained(model, INPUTS, callbacks)


def trained(model, inputs, callbacks):
    data = tf.data.Dataset.from_tensor_slices((inputs, TARGETS)).batch(12)
    history = model.fit(data, epochs=2, verbose=0, callbacks=list(callbacks))
    weights = [keras.ops.convert_to_numpy(keras.ops.cast(one, "float32")) for one in model.weights]
    dtypes = [keras.backend.standardize_dtype(one.dtype) for one in model.weights]
    return {
        "loss": history.history["loss"],
        "prediction": keras.ops.convert_to_numpy(model.predict(inputs, batch_size=12, verbose=0))
        .astype(float)
        .tolist(),
        "weights": [one.tolist() for one in weights],
        "dtypes": dtypes,
    }


class Interrupted(Exception):
    """Ends a training on all workers."""


class Interrupt(keras.callbacks.Callback):
    """Interrupts the second epoch of a training."""

    is_stateless = True
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch:
            raise Interrupted


def resumed(program, strategy, folder):
    """Returns the weights of a training without and with an interruption, and how many batches came after it."""
    whole = program(strategy)

    def recovery():
        return FailureRecovery(folder, every_steps=1, background=False)

    with contextlib.suppress(Interrupted):
        program(strategy, callbacks=[recovery(), Interrupt()])
    batches = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    other = program(strategy, callbacks=[recovery(), count])
    return {"whole": whole["weights"], "resumed": other["weights"], "batches": len(batches)}


MODELS = {"bfloat16": pure_bfloat16, "int8": lambda strategy, **fit: quantized(strategy, "int8", **fit)}
MORE_MODELS = {
    "int4": lambda strategy: quantized(strategy, "int4"),
    "float8": lambda strategy: quantized(strategy, "float8"),
}


def main(folder: Path, name: str) -> None:
    models = globals()[name]
    strategy = MultiWorkerMirroredStrategy()
    seen = {"variables": variables(strategy), "exchanges": exchanges(strategy)}
    seen |= {name: model(strategy) for name, model in models.items()}
    if models is MORE_MODELS:
        sharded = MultiWorkerMirroredStrategy(shard_optimizer_state=True)
        seen |= {f"sharded {name}": model(sharded) for name, model in {**MODELS, **MORE_MODELS}.items()}
        for name, program in {**MODELS, "uint8": counting}.items():
            seen[f"resumed {name}"] = resumed(program, strategy, folder / f"checkpoints {name}")
    (folder / f"seen-{strategy.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
