"""The automatic layout: columns, then rows; heads; the words of embedding and output."""

from typing import Any

import keras
import layout_models as models
import pytest

from tfdist.strategies import auto_layout

layers = keras.layers
pytestmark = pytest.mark.usefixtures("cpus")


def _layouts(model: keras.Model, ways: int = 2) -> dict[str, Any]:
    layout_map = auto_layout(model, ways)
    assert layout_map.device_mesh.shape == (1, ways)
    return {path: layout_map[path].axes for path in layout_map}


def test_it_is_the_layout_of_megatron() -> None:
    model = models.transformer(2)
    by_hand, found = models.layout(2), _layouts(model)
    expected = {one.path: by_hand[one.path].axes for one in model.weights if by_hand[one.path] is not None}
    assert found == expected and len(found) == 23


def test_gated_layers() -> None:
    x = keras.Input((8,))
    gate = layers.Dense(16, "silu", use_bias=False, name="gate")(x)
    product = layers.Multiply()([gate, layers.Dense(16, name="value")(x)])
    model = keras.Model(x, layers.Dense(8, name="down")(layers.Dropout(0.1)(product)))
    columns = {"gate/kernel": (None, "model"), "value/kernel": (None, "model"), "value/bias": ("model",)}
    assert _layouts(model) == {**columns, "down/kernel": ("model", None)}


def test_what_stays_whole() -> None:
    x = keras.Input((6, 8))
    attention = layers.MultiHeadAttention(3, 4)(x, x)  # three heads
    used_twice = layers.Dense(8, name="used_twice")
    twice = used_twice(used_twice(attention))
    odd = layers.Dense(8)(layers.Dense(7, "gelu")(twice))
    skipped = layers.Dense(16, name="skipped")(layers.LayerNormalization()(odd))
    model = keras.Model(x, [layers.Dense(4, name="narrow")(skipped), layers.Dense(9, name="odd")(odd), skipped])
    assert _layouts(model) == {"skipped/kernel": (None, "model"), "skipped/bias": ("model",)}  # an output
