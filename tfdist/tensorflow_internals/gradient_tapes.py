"""Lets a step scale the losses that a `tf.GradientTape` differentiates, unless it scales them itself."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace

Parts = list[tuple[Any, Any]]


@patch
def patch_gradient_tapes(parts: Callable[[list[Any], list[Any] | None], Parts | None]) -> None:
    """Makes `tf.GradientTape.gradient` and `tf.gradients` differentiate `parts(...)` if the sources contain a variable.

    Gradients with respect to tensors (a gradient penalty, an adversarial example) are unchanged.

    Args:
        parts: Takes the targets and, if they are given, the gradients of the loss with respect to each. Returns
            tensors to differentiate instead with the gradient of the loss with respect to each, of the tensor's shape;
            or `None` to change nothing.
    """
    gradient, of_graph = tf.GradientTape.gradient, tf.gradients

    @replace(tf.GradientTape, "gradient")
    def gradient_of_parts(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        given = None if output_gradients is None else tf.nest.flatten(output_gradients)
        found = parts(tf.nest.flatten(target), given) if _has_variable(sources) else None
        if found is not None:
            target, output_gradients = [tensor for tensor, _ in found], [scale for _, scale in found]
        return gradient(self, target, sources, output_gradients, unconnected_gradients)

    @replace(tf, "gradients")
    def gradients_of_parts(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = None if grad_ys is None else tf.nest.flatten(grad_ys)
        found = parts(tf.nest.flatten(ys), given) if _has_variable(xs) else None
        if found is None:
            return of_graph(ys, xs, grad_ys, *args, **kwargs)
        return of_graph([tensor for tensor, _ in found], xs, [scale for _, scale in found], *args, **kwargs)


def _has_variable(sources: Any) -> bool:
    # A variable that a worker has pulled in another dtype has no `handle`; `tf.gradients` takes handles.
    leaves = tf.nest.flatten(sources)
    return any(hasattr(leaf, "trainable") or getattr(leaf, "dtype", None) == tf.resource for leaf in leaves)
