"""Batch normalization normalizes each micro-batch by itself, as a replica with micro-batches does."""

from typing import Any

import keras
import pipeline_runs as runs
import pytest
import tensorflow as tf
from pipeline_runs import difference, layers, strategy_of

from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


class InParts(MirroredStrategy):
    """A replica of micro-batches; `MultiWorkerMirroredStrategy(micro_batches=4)` would take all logical devices."""

    micro_batches = 4


def trained(strategy: Any) -> keras.Model:
    def build() -> keras.Model:
        inputs = keras.Input((12,))
        x = layers.BatchNormalization(momentum=0.8)(layers.Dense(8)(inputs))
        return keras.Model(inputs, layers.Dense(5)(layers.ReLU()(x)))

    with strategy.scope():
        model = runs.made(build, lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1)))
    # The last batch has 2 samples.
    model.fit(runs.X, runs.CLASSES, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model


def test_one_micro_batch_equals_one_process() -> None:
    model = trained(strategy_of(2, micro_batches=1))
    assert difference(model.variables, trained(tf.distribute.get_strategy()).variables) <= 1e-6


def test_micro_batches_equal_those_of_a_replica() -> None:
    model = trained(strategy_of(2, micro_batches=4))
    mirrored = trained(InParts(["CPU:0"]))
    assert difference(model.variables, mirrored.variables) <= 1e-6
    assert difference(model.variables, trained(strategy_of(2, micro_batches=1)).variables) > 1e-2
