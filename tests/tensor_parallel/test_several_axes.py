"""Layouts that use several axes of a mesh: the devices of a stage are their product, and split a variable once."""

from typing import Any

import keras
import layout_models as models
import pipeline_runs as runs
import pytest
from layout_models import strategy_of
from pipeline_runs import difference, fit_both

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.tensor_parallel.split_variable import ShardLayout, SplitVariable

pytestmark = pytest.mark.usefixtures("cpus")


def _layout(shape: tuple[int, ...], names: list[str], rules: dict[str, Any]) -> Any:
    devices = [str(index) for index in range(shape[0] * shape[1])]
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, names, devices=devices))
    for path, axes in rules.items():
        layout[path] = axes
    return layout


def test_weights_equal_those_of_one_process() -> None:
    """Layouts of two axes of a variable, of either one, and of an output, which has no effect."""
    rules = {
        ".*up/kernel": ("data", "model"),
        ".*up/bias": ("model",),
        ".*down/kernel": ("model", "data"),
        ".*first/kernel": (None, "data"),
        ".*first/output": ("data", None),
    }
    strategy = strategy_of(4, layout_map=_layout((2, 2), ["data", "model"], rules))
    model, reference, logs = fit_both(
        strategy, models.mlp, lambda m: runs.compile_classifier(m, keras.optimizers.SGD(0.1, 0.9, global_clipnorm=0.5))
    )
    assert difference(model.weights, reference.weights) <= 1e-6 and logs <= 1e-5
    held = {one.path: held_variable(one) for one in model.weights}
    parts = {path: one.shards for path, one in held.items() if isinstance(one, SplitVariable)}
    assert {path: tuple(shards[0].shape) for path, shards in parts.items()} == {
        "first/kernel": (12, 2),
        "up/kernel": (8, 4),
        "up/bias": (4,),
        "down/kernel": (4, 8),
    }
    assert {len({part.device for part in shards}) for shards in parts.values()} == {4}


def test_which_axis_is_split() -> None:
    rules = {
        "a": ("x", "y"),
        "b": ("y", "x"),
        "c": ("y", None),
        "d": ("y", "y"),
        "e": ("one", None),
        "f/output": ("z",),
    }
    mesh = keras.distribution.DeviceMesh((2, 3, 1, 5), ["x", "y", "one", "z"], devices=[str(i) for i in range(30)])
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in rules.items():
        layout_map[path] = axes
    layout = ShardLayout(layout_map)
    assert layout.ways == 6  # without what only outputs use
    assert [layout.axis_at(path, (12, 12)) for path in "abcex"] == [1, 0, 0, None, None]
    assert layout.axis_at("a", (12, 9)) == 0  # the other axis that the layout names
    assert layout.axis_at("a", (9, 9)) == 1  # padded
    for path, shape in {"a": (9, 5), "d": (12, 12), "c": (12,)}.items():
        with pytest.raises(ValueError, match="does not fit its variable.*the product of all"):
            layout.axis_at(path, shape)
