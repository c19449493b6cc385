"""Cases about optimizers: slots, clipping, accumulation, averages, schedules, loss scales."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import CASES, INPUTS, LABELS, Case, Outcome, case, classifier, dataset, fitted

from tfdist.callbacks import GradientAccumulation

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
MICRO_STEPS = 4


@case()
def adam(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: Adam(0.01))


def _optimizer_case(name: str, optimizer: Callable[[], keras.optimizers.Optimizer], **arguments: Any) -> None:
    def run(strategy: tf.distribute.Strategy) -> Outcome:
        return fitted(strategy, optimizer, **arguments)

    CASES[name] = Case(name, run, run)


# Only in `make parity`: tests/any_strategy has such optimizers under each strategy.
_optimizer_case("sgd_with_momentum", lambda: SGD(0.1, momentum=0.9, nesterov=True))
_optimizer_case("adamw", lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))
_optimizer_case("weight_decay", lambda: SGD(0.1, momentum=0.9, weight_decay=0.05))
_optimizer_case("clipnorm", lambda: SGD(0.5, momentum=0.9, clipnorm=0.1))
_optimizer_case("clipvalue", lambda: SGD(0.5, momentum=0.9, clipvalue=0.01))
_optimizer_case("ema", lambda: SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3))
for _name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam", "RMSprop"):
    _optimizer_case(f"optimizer_{_name.lower()}", getattr(keras.optimizers, _name), epochs=1)


@case()
def global_clipnorm(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: SGD(0.5, momentum=0.9, global_clipnorm=0.2))


def _without_logs(outcome: Outcome) -> Outcome:
    # Micro-steps are logged each, the reference's batch once.
    return {"weights": outcome["weights"]}


def _optimizer_with_everything(steps: int | None) -> keras.optimizers.Optimizer:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.02])
    return SGD(
        schedule,
        momentum=0.9,
        weight_decay=0.01,
        global_clipnorm=0.3,
        use_ema=True,
        ema_momentum=0.9,
        gradient_accumulation_steps=steps,
    )


def _big_batch(strategy: tf.distribute.Strategy) -> Outcome:
    return _without_logs(fitted(strategy, lambda: _optimizer_with_everything(None), data=dataset(4 * MICRO_STEPS)))


@case(_big_batch)
def accumulation_with_clipping_ema_decay_and_schedule(strategy: tf.distribute.Strategy) -> Outcome:
    return _without_logs(fitted(strategy, lambda: _optimizer_with_everything(MICRO_STEPS), data=dataset(4)))


@case(_big_batch)
def accumulation_in_steps_per_execution(strategy: tf.distribute.Strategy) -> Outcome:
    return _without_logs(
        fitted(strategy, lambda: _optimizer_with_everything(MICRO_STEPS), data=dataset(4), steps_per_execution=3)
    )


@case(_big_batch)
def accumulation_by_callback(strategy: tf.distribute.Strategy) -> Outcome:
    fit = {"callbacks": [GradientAccumulation(MICRO_STEPS)]}
    return _without_logs(fitted(strategy, lambda: _optimizer_with_everything(None), data=dataset(4), fit=fit))


def _loss_scaled(inner: Any, **arguments: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(inner, **arguments)


@case()
def loss_scale(strategy: tf.distribute.Strategy) -> Outcome:
    return fitted(strategy, lambda: _loss_scaled(Adam(0.01), dynamic_growth_steps=3))


def _overflowing(strategy: tf.distribute.Strategy, batch_size: int, steps: int | None) -> Outcome:
    """Trains with one sample, in the second of four batches, whose gradient overflows: one replica sees it."""
    inputs = INPUTS.copy()
    inputs[16 + 1, 0] = 1e37
    with strategy.scope():
        model = classifier()
        optimizer = _loss_scaled(Adam(0.01, gradient_accumulation_steps=steps), initial_scale=2.0**15)
        model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(dataset(batch_size, inputs, LABELS), epochs=1, verbose=0)
    assert np.isfinite(np.concatenate([weight.ravel() for weight in model.get_weights()])).all()
    return {
        "weights": model.get_weights(),
        "scale": float(optimizer.dynamic_scale.numpy()),
        "updates": int(keras.ops.convert_to_numpy(optimizer.iterations)),
    }


@case()
def loss_scale_overflow_on_one_replica(strategy: tf.distribute.Strategy) -> Outcome:
    outcome = _overflowing(strategy, batch_size=16, steps=None)
    assert outcome["scale"] == 2.0**14 and outcome["updates"] == 3, outcome
    return outcome


@case(lambda strategy: _overflowing(strategy, batch_size=16, steps=None))
def loss_scale_overflow_in_an_accumulation(strategy: tf.distribute.Strategy) -> Outcome:
    return _overflowing(strategy, batch_size=4, steps=4)
