"""What a worker does for `test_compression_on_workers.py`; every rank writes what it has received and sent."""

import json
import sys
from pathlib import Path

import exchange_model
import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies import MultiWorkerMirroredStrategy


def digest(model):
    return [weight.tobytes().hex() for weight in model.get_weights()]


def train(strategy):
    """A model with a table, of which the workers touch other rows."""
    with strategy.scope():
        table = keras.layers.Embedding(100, 16, name="table")
        layers = [keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), keras.layers.Dense(8, name="top")]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), loss="mse")
    random = np.random.default_rng(0)
    inputs, targets = random.integers(0, 100, size=(26, 3)), random.normal(size=(26, 8)).astype("float32")
    model.fit(tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(6), epochs=2, verbose=0)
    return model


def exchange(folder: Path, restored: tuple[str, ...] = ()) -> None:
    """Exchanges given gradients by all methods, resumes with saved residuals, and trains.

    Args:
      folder: where to write `compression-<rank>.npz` and `compression-<rank>.json`.
      restored: prefixes of the checkpoints of other workers; none: nothing is resumed.
    """
    strategy = MultiWorkerMirroredStrategy(compression=exchange_model.policy())
    exchanges = exchange_model.Exchanges(strategy)
    arrays = {}
    for step in range(exchange_model.STEPS):
        for name, local in exchanges.sums(exchange_model.gradient, step).items():
            assert all(np.array_equal(local[0], other) for other in local), f"the devices differ in {name}"
            arrays[f"{step}:{name}"] = local[0]
    (number,) = exchanges.state()
    arrays |= {f"residual:{name}": value for name, value in exchanges.state()[number].items()}
    checkpoint = tf.train.Checkpoint(compression=strategy.compression_state)
    seen = {"number": number, "wire": {label: c.wire_bytes for label, c in strategy.communication_by_method.items()}}
    seen["prefix"] = checkpoint.save(folder / f"rank-{strategy.rank}" / "state")

    if restored:  # what other workers have saved, delivered by steps without gradients
        strategy.compression_state.restore(list(restored))
        nothing = exchanges.sums(lambda name, replica, step: np.zeros_like(exchange_model.gradient(name, 0, 0)), 0)
        arrays |= {f"late:{name}": local[0] for name, local in nothing.items()}
        arrays |= {f"late residual:{name}": value for name, value in exchanges.state()[number].items()}
    rules = {"table": "int8", "top": "powersgd:1"}
    trained = MultiWorkerMirroredStrategy(compression=exchange_model.Policy(rules, dense_below=0))
    seen["digest"] = digest(train(trained))
    np.savez(folder / f"compression-{strategy.rank}.npz", **arrays)
    Path(folder, f"compression-{strategy.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    exchange(Path(sys.argv[1]), tuple(sys.argv[2:]))
