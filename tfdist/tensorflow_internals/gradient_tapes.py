"""Lets a step scale the losses that a `tf.GradientTape` differentiates, unless it scales them itself."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_LIBRARIES = frozenset({"keras", "tensorflow", "tfdist"})

Parts = list[tuple[Any, Any]]


def patch_gradient_tapes(parts: Callable[[list[Any]], Parts | None]) -> None:
    """Makes `tf.GradientTape.gradient` differentiate `parts(targets)` if the sources contain a variable.

    Gradients with respect to tensors (a gradient penalty, an adversarial example) are unchanged, and those with given
    `output_gradients`. May be called more than once, with different functions.

    Args:
        parts: Takes the targets, returns tensors to differentiate instead with the gradient of the loss with respect to
            each, of the tensor's shape; or `None` to change nothing.
    """
    gradient = tf.GradientTape.gradient

    @functools.wraps(gradient)
    def gradient_of_parts(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        # A variable that a worker has pulled in another dtype has no `handle`.
        has_variable = any(hasattr(source, "trainable") for source in tf.nest.flatten(sources))
        targets = tf.nest.flatten(target)
        found = parts(targets) if has_variable and output_gradients is None else None
        if found is None:
            return gradient(self, target, sources, output_gradients, unconnected_gradients)
        tensors, scales = [tensor for tensor, _ in found], [scale for _, scale in found]
        return gradient(self, tensors, sources, scales, unconnected_gradients)

    tf.GradientTape.gradient = gradient_of_parts


def is_read_by_user() -> bool:
    """Whether the caller's property is being read by a user's code, or for it by `tf.nn.scale_regularization_loss`.

    TensorFlow's strategies, Keras and tfdist read the number of replicas, too.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("tensorflow.python.distribute."):
            return module.startswith("tensorflow.python.ops.nn_impl") or module.partition(".")[0] not in _LIBRARIES
        frame = frame.f_back
    return False
