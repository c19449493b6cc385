"""A program for `keras.distribution.ModelParallel`. Run with Keras on JAX, it stores the weights that it has learned.

    KERAS_BACKEND=jax XLA_FLAGS=--xla_force_host_platform_device_count=4 \
        python layouts_on_jax.py weights.npz learned.npz batch_devices model_devices

It imports nothing of tfdist, whose test trains the same model with the same layout map.
"""

import sys
from typing import Any

import keras
import numpy as np

layers = keras.layers
LENGTH, WORDS, WIDTH = 6, 24, 16
rng = np.random.default_rng(3)
TOKENS = rng.integers(1, WORDS, (64, LENGTH))
NEXT = rng.integers(0, WORDS, (64, LENGTH))


def layout_of(devices: Any, batch: int, model: int) -> Any:
    """Returns a layout map with rules as in Keras' guides."""
    mesh = keras.distribution.DeviceMesh((batch, model), ["batch", "model"], devices=devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["embedding/embeddings"] = ("model", None)
    layout_map[".*attention.*(query|key|value).*kernel"] = (None, "model", None)
    layout_map[".*attention.*(query|key|value).*bias"] = ("model", None)
    layout_map[".*attention_output.*kernel"] = ("model", None, None)
    layout_map[".*up.*kernel"] = (None, "model")
    layout_map[".*up.*bias"] = ("model",)
    layout_map[".*down.*kernel"] = ("model", None)
    layout_map["logits/kernel"] = keras.distribution.TensorLayout((None, "model"), mesh)
    return layout_map


def compiled_model() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="embedding")(tokens)
    for block in range(2):
        given = layers.LayerNormalization(name=f"first_norm_{block}")(x)
        x = x + layers.MultiHeadAttention(4, 4, name=f"attention_{block}")(given, given, use_causal_mask=True)
        given = layers.LayerNormalization(name=f"second_norm_{block}")(x)
        hidden = layers.Dense(2 * WIDTH, "gelu", name=f"up_{block}")(given)
        x = x + layers.Dense(WIDTH, name=f"down_{block}")(hidden)
    model = keras.Model(tokens, layers.Dense(WORDS, name="logits")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def trained(model: keras.Model, weights: list[np.ndarray]) -> list[float]:
    """Trains from given weights; returns the loss and the accuracy of each epoch."""
    model.set_weights(weights)
    found = model.fit(TOKENS, NEXT, batch_size=16, epochs=5, shuffle=False, verbose=0).history
    return [*found["loss"], *found["accuracy"]]


def main() -> None:
    given, stored, batch, model_devices = sys.argv[1:]
    devices = keras.distribution.list_devices("cpu")
    layout_map = layout_of(devices, int(batch), int(model_devices))
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout_map))
    model = compiled_model()
    with np.load(given) as weights:
        logs = trained(model, [weights[name] for name in weights.files])
    split = [one.path for one in model.weights if not one.value.sharding.is_fully_replicated]
    arrays = {str(index): np.asarray(one) for index, one in enumerate(model.get_weights())}
    np.savez(stored, logs=logs, split=split, devices=len(devices), **arrays)


if __name__ == "__main__":
    main()
