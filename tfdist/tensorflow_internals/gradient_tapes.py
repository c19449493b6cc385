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
        found = _parts(target, sources, output_gradients)
        if found is not None:
            target, output_gradients = [tensor for tensor, _ in found], [scale for _, scale in found]
        return gradient(self, target, sources, output_gradients, unconnected_gradients)

    @replace(tf, "gradients")
    def gradients_of_parts(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = _parts(ys, xs, grad_ys)
        if found is None:
            return of_graph(ys, xs, grad_ys, *args, **kwargs)
        return of_graph([tensor for tensor, _ in found], xs, [scale for _, scale in found], *args, **kwargs)


def _parts(targets: Any, sources: Any, gradients: Any) -> list[tuple[Any, Any]] | None:
    step = of_running_step(lambda hooks: hooks.current_step()) if _has_variable(sources) else None
    given = None if gradients is None else tf.nest.flatten(gradients)
    return None if step is None else step.parts_of_gradient(tf.nest.flatten(targets), given)


def _has_variable(sources: Any) -> bool:
    # A variable that a worker has pulled in another dtype has no `handle`; `tf.gradients` takes handles.
    leaves = tf.nest.flatten(sources)
    return any(hasattr(leaf, "trainable") or getattr(leaf, "dtype", None) == tf.resource for leaf in leaves)
