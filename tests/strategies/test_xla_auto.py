"""`jit_compile="auto"`: XLA compiles models for which it was measured to pay."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.keras_internals.compiled_calls import jit_compiles
from tfdist.strategies import MirroredStrategy


def attention(width=4, heads=1, *others):
    tokens = keras.Input((5, width))
    attended = keras.layers.MultiHeadAttention(heads, width // heads)(tokens, tokens)
    for layer in others:
        attended = layer(attended)
    return keras.Model(tokens, keras.layers.Dense(3)(attended))


LARGE = 512  # 4 matrices: 1.05 million parameters
DECISIONS = {
    "large attention": (lambda: attention(LARGE, 8), "auto", True),
    "small attention": (attention, "auto", False),
    "attention and convolutions": (lambda: attention(LARGE, 8, keras.layers.Conv1D(8, 1)), "auto", False),
    "large matrices": (lambda: keras.Sequential([keras.Input((1100,)), keras.layers.Dense(1000)]), "auto", False),
    "forbidden": (lambda: attention(LARGE, 8), False, False),
    "demanded": (attention, True, True),
}


@pytest.mark.parametrize(("build", "jit_compile", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_auto_compiles_where_it_was_measured_to_pay(cpus, build, jit_compile, expected):
    with MirroredStrategy(cpus[:2]).scope():
        model = build()
        model.compile("sgd", "mse", jit_compile=jit_compile)
    assert jit_compiles(model) is expected
    assert bool(model.jit_compile) is (jit_compile is True)  # what Keras compiles
    assert json.loads(json.dumps(model.get_compile_config()))["jit_compile"] == jit_compile
    spec = tf.zeros([4, 5, LARGE]), tf.zeros([4])
    assert jit_compiles(model, spec) is expected


def test_auto_leaves_samples_without_a_fixed_shape(cpus):
    with MirroredStrategy(cpus[:2]).scope():
        model = attention(LARGE, 8)
        model.compile("sgd", "mse")
    seen = []

    @tf.function(input_signature=[tf.TensorSpec([None, None, LARGE])])
    def of(rows):
        seen.append((jit_compiles(model, (rows, rows[:, 0, 0])), jit_compiles(model, rows[:, 0])))

    of(tf.zeros([2, 3, LARGE]))
    assert seen == [(False, True)]


def test_auto_of_other_strategies_is_that_of_keras(cpus):
    MirroredStrategy(cpus[:2])  # patches Keras
    model = attention()
    model.compile("sgd", "mse")
    assert model.jit_compile is False and not jit_compiles(model)


def test_auto_trains_a_large_model_with_attention_by_xla(cpus, compiled):
    with MirroredStrategy(cpus[:2]).scope():
        model = attention(LARGE, 8)
        model.compile("sgd", "mse")
    model.fit(np.zeros((4, 5, LARGE), "float32"), np.zeros((4, 5, 3), "float32"), batch_size=4, verbose=0)
    assert compiled["calls"] >= 4 and compiled["updates"] == 2
