"""The table of docs/model_parallel.md that says what works together, cell by cell."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import layout_models as models
import pipeline_runs as runs
import pytest
import tensorflow as tf

from tfdist.callbacks import FailureRecovery
from tfdist.compression import Policy
from tfdist.strategies import ModelParallelStrategy, Pipeline

pytestmark = pytest.mark.usefixtures("cpus")

_PAGE = Path(__file__).parents[2] / "docs" / "model_parallel.md"
_KINDS = ("stages", "stages and columns", "`layout_map`")


def _table() -> dict[tuple[str, str], str]:
    """The cells by feature and kind."""
    section = _PAGE.read_text().split("## What works together")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    assert rows[0] == ["feature", *_KINDS]
    return {(row[0], kind): cell for row in rows[2:] for kind, cell in zip(_KINDS, row[1:], strict=True)}


def _sgd(**options: Any) -> Callable[[], Any]:
    return lambda: keras.optimizers.SGD(0.1, momentum=0.9, **options)


# By feature: the optimizer, and the options of the strategy, of a layer, of `compile` and of `fit`.
_FEATURES: dict[str, dict[str, Any]] = {
    '`compression="int8"`': {"strategy": {"compression": Policy("int8", dense_below=0)}},  # the variables are small
    "`clipnorm`": {"optimizer": _sgd(clipnorm=0.1)},
    "`global_clipnorm`": {"optimizer": _sgd(global_clipnorm=0.1)},
    "`use_ema`": {"optimizer": _sgd(use_ema=True, ema_overwrite_frequency=2)},
    "`gradient_accumulation_steps`": {"optimizer": _sgd(gradient_accumulation_steps=2)},
    "`LossScaleOptimizer`": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(_sgd()(), initial_scale=8.0)},
    "`Lamb`": {"optimizer": lambda: keras.optimizers.Lamb(0.01)},
    "`Adafactor`": {"optimizer": lambda: keras.optimizers.Adafactor(0.01)},
    "`Muon`": {"optimizer": lambda: keras.optimizers.Muon(0.01)},
    '`kernel_regularizer="l2"`': {"layer": {"kernel_regularizer": "l2"}},
    '`kernel_constraint="non_neg"`': {"layer": {"kernel_constraint": "non_neg"}},
    '`kernel_constraint="max_norm"`': {"layer": {"kernel_constraint": "max_norm"}},
    "`steps_per_execution`": {"compile": {"steps_per_execution": 2}},
    "`FailureRecovery`": {"recovers": True},
    "`run_eagerly`": {"compile": {"run_eagerly": True}},
    "`jit_compile`": {"compile": {"jit_compile": True}},
}


def _strategy(kind: str, **options: Any) -> Any:
    if kind == "`layout_map`":
        return models.strategy_of(2, columns=1 + bool(options), **options)
    columns = 2 if kind == "stages and columns" else 1
    devices = [f"CPU:{index}" for index in range(2 * columns)]
    return ModelParallelStrategy(devices, pipeline=Pipeline(2, 2), data_parallel=columns, **options)


def _trained(strategy: Any, feature: dict[str, Any], directory: Path | None) -> Any:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = models.mlp(**feature.get("layer", {}))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(feature.get("optimizer", _sgd())(), loss, **feature.get("compile", {}))
    callbacks = [FailureRecovery(directory)] if directory is not None else []
    for epochs in (1, 2) if callbacks else (2,):
        model.fit(runs.X, runs.CLASSES, 16, epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return model


def _cells() -> list[Any]:
    """Errors by default; the others are also in the tests of each feature."""
    long = pytest.mark.long
    return [pytest.param(*key, marks=[] if cell == "error" else long) for key, cell in _table().items()]


def test_every_feature_is_tried() -> None:
    assert {feature for feature, _ in _table()} == set(_FEATURES)
    assert set(_table().values()) == {"yes", "error", "no effect"}


@pytest.mark.parametrize(("name", "kind"), _cells())
def test_combination(name: str, kind: str, tmp_path: Path) -> None:
    feature, cell = _FEATURES[name], _table()[name, kind]
    strategy = _strategy(kind, **feature.get("strategy", {}))
    if cell == "error":
        with pytest.raises(ValueError, match=r"(?s)Received: .*Expected: ") as raised:
            _trained(strategy, feature, None)
        assert not re.search("Traceback|in user code", str(raised.value))
        named = "constraint" if "constraint" in name else name.strip("`")
        assert named in str(raised.value), "an error of something else"
        return
    model = _trained(strategy, feature, tmp_path if feature.get("recovers") else None)
    reference = _trained(tf.distribute.get_strategy(), feature, None)
    apart = runs.difference(model.weights, reference.weights)
    if name.startswith("`compression") and cell == "yes":
        # By what the residuals of two columns keep: rate / (1 - momentum) times 1/254 of the largest gradient, below 1.
        assert 1e-5 < apart <= 0.1 / (1 - 0.9) * 2 / 254
    else:
        assert apart <= 1e-5
