"""Lets a step scale the losses that a `tf.GradientTape` differentiates, unless it scales them itself."""

from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.strategy_hooks import of_running_step


@patch
def patch_gradient_tapes() -> None:
    """Makes tapes and `tf.gradients` differentiate a step's `parts_of_gradient` if the sources contain a variable.

    Gradients with respect to tensors (a gradient penalty, an adversarial example) are unchanged.
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
        parts = _parts(target, sources, output_gradients)
        if parts is not None:
            target, output_gradients = [tensor for tensor, _ in parts], [scale for _, scale in parts]
        return gradient(self, target, sources, output_gradients, unconnected_gradients)

    @replace(tf, "gradients")
    def gradients_of_parts(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        parts = _parts(ys, xs, grad_ys)
        if parts is None:
            return of_graph(ys, xs, grad_ys, *args, **kwargs)
        return of_graph([tensor for tensor, _ in parts], xs, [scale for _, scale in parts], *args, **kwargs)


def _parts(targets: Any, sources: Any, gradients: Any) -> list[tuple[Any, Any]] | None:
    step = of_running_step(lambda hooks: hooks.current_step()) if _has_variable(sources) else None
    output_gradients = None if gradients is None else tf.nest.flatten(gradients)
    return None if step is None else step.parts_of_gradient(tf.nest.flatten(targets), output_gradients)


def _has_variable(sources: Any) -> bool:
    # A variable that a worker has pulled in another dtype has no `handle`; `tf.gradients` takes handles.
    leaves = tf.nest.flatten(sources)
    return any(hasattr(leaf, "trainable") or getattr(leaf, "dtype", None) == tf.resource for leaf in leaves)
