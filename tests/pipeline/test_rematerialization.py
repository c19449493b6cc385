"""Rematerialized layers in stages learn the same weights, and the backward pass receives fewer activations."""

from typing import Any

import keras
import pipeline_runs as runs
import pytest
import tensorflow as tf
from pipeline_runs import difference, layers, strategy_of

pytestmark = pytest.mark.usefixtures("cpus")
WIDTH = 16


@keras.saving.register_keras_serializable("tests")
class Block(layers.Layer):
    """Layers with masks, random numbers, losses and moving statistics, which inherit `training` from the call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm, self.attention = layers.BatchNormalization(), layers.MultiHeadAttention(2, 8, dropout=0.2, seed=1)
        self.up, self.down = layers.Dense(8 * WIDTH, "gelu", activity_regularizer="l2"), layers.Dense(WIDTH)
        self.dropout, self.penalty = layers.Dropout(0.3, seed=2), runs.Penalty()
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 8 * WIDTH))

    def call(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x), x)
        return x + self.penalty(self.dropout(self.down(self.up(x))))


def trained(mode: str | None) -> tuple[keras.Model, int]:
    """Trains a model under `keras.RematScope`, and returns it with the elements that forward functions return."""
    keras.utils.set_random_seed(1)
    with strategy_of(2, columns=1, micro_batches=2).scope():
        tokens = keras.Input((runs.LENGTH,), dtype="int32")
        x = layers.Embedding(runs.WORDS, WIDTH, mask_zero=True)(tokens)
        with keras.RematScope(mode=mode):
            for number in range(2):
                x = Block(name=f"block_{number}")(x)
        model = keras.Model(tokens, layers.Dense(runs.WORDS, dtype="float32")(x))
        runs.compile_classifier(model, keras.optimizers.Adam(1e-2))
    data = tf.data.Dataset.from_tensor_slices((runs.TOKENS, runs.TARGETS["words"])).batch(16, drop_remainder=True)
    model.fit(data.take(3), epochs=2, verbose=0)
    step = tf.function(lambda: model.distribute_strategy.run(model.train_step, (next(iter(data)),)))
    graph = step.get_concrete_function().graph
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type and "forward" in op.get_attr("f").name]
    return model, sum(one.shape.num_elements() or 0 for op in calls for one in op.outputs)


@pytest.mark.long
def test_rematerialization_changes_memory_only() -> None:
    model, elements = trained("full")
    reference, of_reference = trained(None)
    # Another graph rounds otherwise; other numbers of dropout would differ by 1e-2.
    assert difference(model.variables, reference.variables) <= 1e-5
    assert elements < 0.3 * of_reference, (elements, of_reference)


def test_rematerialized_layers_equal_one_process() -> None:
    """In one process Keras' own rematerialization does not accept `training` under TensorFlow."""
    modes = iter(["larger_than", None])

    def build() -> keras.Model:
        inputs = keras.Input((12,))
        with keras.RematScope(mode=next(modes), output_size_threshold=10):
            x = layers.Dense(16, "tanh", kernel_regularizer="l2", activity_regularizer="l2")(inputs)
            x = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(16)], name="inner")(x)
        return keras.Model(inputs, layers.Dense(5)(x))

    model, reference, logs = runs.fit_both(
        strategy_of(2, 2, cuts=["inner"]), build, lambda m: runs.compile_classifier(m, keras.optimizers.Adam(1e-2))
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
