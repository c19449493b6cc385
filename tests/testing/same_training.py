"""Compares the training of a program under a strategy with that of one process."""

from dataclasses import replace
from typing import Any

import tensorflow as tf
from comparison import TOLERANCE, largest_difference
from one_process import in_one_process

from testing.programs import Program, Training


def assert_same_training(strategy: tf.distribute.Strategy, program: Program, tolerance: float = TOLERANCE) -> Training:
    """Trains a program under a strategy, and in one process on the big batch, whose `outcome` is equal.

    Args:
      strategy: what trains it.
      program: one process does not accumulate, but takes the batches of an update together.
      tolerance: the largest difference, relative where a number is larger than 1.

    Returns:
      The `Training` under the strategy.
    """
    steps = program.micro_steps
    alone = replace(program, micro_steps=1, batch_size=program.batch_size * steps, compile=_of_one_process(program))
    training = program.trained(strategy)
    ours, reference = outcome(training), outcome(in_one_process(alone.trained))
    if steps > 1:  # Keras logs each micro-step
        del ours["logs"], reference["logs"]
    assert largest_difference(ours, reference) <= tolerance, differences(ours, reference)
    return training


def outcome(training: Training) -> dict[str, Any]:
    """The weights, the logs, the scale of the loss, and an evaluation."""
    weights, scale = training.model.get_weights(), training.loss_scale
    return {"weights": weights, "logs": training.logs, "loss scale": scale, "evaluation": training.evaluated()}


def differences(ours: Any, reference: Any) -> dict[str, float]:
    """The largest difference of each part, for the message of a failed test."""
    return {name: largest_difference(ours[name], reference[name]) for name in reference}


def _of_one_process(program: Program) -> dict[str, Any]:
    """The options of `compile` that say what is computed, not how."""
    how = {"jit_compile", "steps_per_execution", "run_eagerly"}
    return {name: value for name, value in program.compile.items() if name not in how}
