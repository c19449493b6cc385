"""Runs the program that a comparison takes as its reference, in one process."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def in_one_process(program: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Returns what a program of a strategy returns without one: eagerly, as its few steps take less than their tracing.

    Args:
      program: called with the default strategy.
      *arguments: its further arguments.
      **keywords: its keyword arguments.
    """
    tf.config.run_functions_eagerly(True)
    try:
        return program(tf.distribute.get_strategy(), *arguments, **keywords)
    finally:
        tf.config.run_functions_eagerly(False)
