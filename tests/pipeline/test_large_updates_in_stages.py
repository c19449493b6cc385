"""XLA compiles the updates of large variables of stages on CPUs, unless the user or columns forbid it."""

from collections.abc import Callable
from typing import Any

import keras
import pipeline_runs as runs
import pytest
from pipeline_runs import difference, fit_both, strategy_of

from tfdist.keras_internals import optimizers
from tfdist.tensorflow_internals.xla_functions import call_compiled

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The shapes of the gradients of each compiled update; variables are large from 100 values on."""
    shapes = []

    def counted(function: Callable[..., Any], tensors: Any) -> Any:
        results = call_compiled(function, tensors)
        if results is not None:
            shapes.append([tuple(tensor.shape) for tensor in tensors])
        return results

    monkeypatch.setattr(optimizers, "call_compiled", counted)
    monkeypatch.setattr(optimizers, "LARGE_UPDATE", 100)
    return shapes


def decayed() -> Any:
    options = {"use_ema": True, "ema_overwrite_frequency": 4, "global_clipnorm": 0.5}
    return keras.optimizers.AdamW(1e-2, weight_decay=0.1, **options)


def accumulated() -> Any:
    inner = keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)


@pytest.mark.parametrize("optimizer", [decayed, accumulated])
def test_updates_equal_those_of_one_process(optimizer: Any, updated: list[Any]) -> None:
    compile_model = lambda m: runs.compile_classifier(m, optimizer())  # noqa: E731
    model, reference, _ = fit_both(strategy_of(2, cuts=["second"]), _mlp, compile_model)
    assert sorted(updated) == [[(12, 16)], [(16, 16)]]  # one of each stage, without vectors and the last matrix
    # 12 updates of rate 0.05 at most, each with a few roundings of 6e-8
    assert difference(model.weights, reference.weights) <= 1e-6
    found, expected = (
        [variable for variable in one.optimizer.variables if variable.name != "step_counter"]  # counts updates
        for one in (model, reference)
    )
    assert difference(found, expected) <= 1e-6


@pytest.mark.parametrize(
    ("columns", "options", "optimizer"),
    [(2, {}, decayed), (1, {"jit_compile": False}, decayed), (1, {}, lambda: keras.optimizers.Nadam(1e-2))],
    ids=["columns", "jit_compile", "nadam"],
)
def test_other_updates_are_not_compiled(columns: int, options: Any, optimizer: Any, updated: list[Any]) -> None:
    with strategy_of(2, columns, cuts=["second"]).scope():
        model = runs.made(_mlp, lambda m: runs.compile_classifier(m, optimizer(), **options))
    model.train_on_batch(runs.X, runs.CLASSES)
    assert not updated


def _mlp() -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((12,)), dense(16, "tanh"), dense(16, "tanh", name="second"), dense(5)])
