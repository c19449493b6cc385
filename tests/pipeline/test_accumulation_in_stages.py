"""Micro-steps under stages: schedules and averages count updates, and an overflow skips a complete update."""

from typing import Any

import keras
import numpy as np
import pipeline_runs as runs
import pytest
import tensorflow as tf
from one_process import in_one_process
from pipeline_runs import difference, difference_of_columns, strategy_of

from tfdist.callbacks import GradientAccumulation

optimizers = keras.optimizers
pytestmark = pytest.mark.usefixtures("cpus")


def with_everything(steps: int | None) -> keras.optimizers.Optimizer:
    schedule = optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.02])
    options = {"momentum": 0.9, "weight_decay": 0.01, "global_clipnorm": 0.3, "use_ema": True, "ema_momentum": 0.9}
    return optimizers.SGD(schedule, gradient_accumulation_steps=steps, **options)


def fitted(strategy: Any, optimizer: Any, batch_size: int, x: Any = runs.X[:48], **options: Any) -> keras.Model:
    with strategy.scope():
        model = runs.made(runs.mlp, lambda m: runs.compile_classifier(m, optimizer()))
    model.fit(x, runs.CLASSES[:48], batch_size=batch_size, shuffle=False, verbose=0, **options)
    return model


@pytest.mark.parametrize("by_callback", [pytest.param(False, marks=pytest.mark.long), True])
def test_micro_steps_equal_a_step_on_a_large_batch(by_callback: bool) -> None:
    callbacks = [GradientAccumulation(3)] if by_callback else []
    steps = None if by_callback else 3
    model = fitted(strategy_of(2, 2), lambda: with_everything(steps), 8, epochs=3, callbacks=callbacks)
    reference = in_one_process(lambda strategy: fitted(strategy, lambda: with_everything(None), 24, epochs=3))
    assert int(model.optimizer.iterations.numpy()) == 6
    assert difference(model.weights, reference.weights) <= 1e-6 and difference_of_columns(model) == 0.0


def test_the_rest_of_an_update_with_a_fixed_loss_scale() -> None:
    """Keras divides by `loss_scale_factor` before it accumulates, so that sums of gradients are not scaled by it."""

    def model_of(strategy: Any, batch_size: int, **options: Any) -> keras.Model:
        with strategy.scope():
            model = runs.made(
                runs.mlp, lambda m: runs.compile_classifier(m, optimizers.SGD(0.1, loss_scale_factor=8.0))
            )
        model.fit(runs.X[:40], runs.CLASSES[:40], batch_size=batch_size, shuffle=False, verbose=0, **options)
        return model

    model = model_of(strategy_of(2, 2), 8, callbacks=[GradientAccumulation(2, flush_at_end=True)])
    reference = in_one_process(lambda strategy: model_of(strategy, 16))
    assert difference(model.weights, reference.weights) <= 1e-6 and difference_of_columns(model) == 0.0


def test_an_overflow_skips_a_complete_update() -> None:
    x = runs.X[:48].copy()
    x[17, 0] = np.inf  # the gradient is NaN in the second micro-step of the second update

    def scaled(steps: int | None) -> Any:
        return lambda: optimizers.LossScaleOptimizer(
            optimizers.Adam(0.01, gradient_accumulation_steps=steps), initial_scale=2.0**15
        )

    model, reference = (
        fitted(strategy_of(2), scaled(3), 4, x),
        fitted(tf.distribute.get_strategy(), scaled(None), 12, x),
    )
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert difference(model.weights, reference.weights) <= 1e-6
    for one in (model, reference):
        assert float(one.optimizer.dynamic_scale.numpy()) == 2.0**14
        assert int(keras.ops.convert_to_numpy(one.optimizer.iterations)) == 3
