"""What the devices hold: whole variables, their copies in columns, and parts of split ones."""

import keras
import layout_models as models
import numpy as np
import pipeline_runs as runs
import pytest

from tfdist.pipeline.placed_models import variable_bytes_by_device

pytestmark = pytest.mark.usefixtures("cpus")


def test_parts_and_copies_count_where_they_are() -> None:
    strategy = models.strategy_of(2, columns=2)
    with strategy.scope():
        model = models.mlp()
        runs.compile_classifier(model, keras.optimizers.SGD(0.1, momentum=0.9))
    model.fit(runs.X, runs.CLASSES, epochs=1, verbose=0)
    held = strategy.variable_bytes_by_device(model)
    of_devices = {device: held[device] for column in strategy.columns for device in column}
    assert len(of_devices) == 4
    numbers = sum(np.prod(one.shape) for one in model.variables)
    split = sum(np.prod(one.shape) for one in model.variables if hasattr(one.value, "shards"))
    assert split > 0
    expected = 2 * 4 * (numbers - split / 2)  # weights and momenta; the first device also has scalars of the optimizer
    assert all(expected <= found <= expected + 32 for found in of_devices.values()), of_devices


def test_without_a_strategy_one_device_holds_all() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    (held,) = variable_bytes_by_device(model).values()
    assert held == 4 * 8
