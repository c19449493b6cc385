"""What cannot work on several replicas, refused before the step is traced, with the remedy."""

from collections.abc import Sequence
from typing import Any

from tfdist.keras_internals.models import first_variable_outside, is_made_under


def refuse_impossible(model: Any, strategy: Any, devices: Sequence[str], *, training: bool) -> None:
    """Raises an error if a step of `model` cannot run under `strategy`.

    Args:
      model: a compiled Keras model.
      strategy: the strategy that runs the step.
      devices: the devices of the strategy's local replicas.
      training: whether it is a training step.

    Raises:
      ValueError: the model was compiled with `jit_compile=True` for CPU replicas; or it, its metrics or its optimizer
        were not made under the strategy's scope.
    """
    if model.jit_compile and strategy.num_replicas_in_sync > 1 and any("CPU" in device for device in devices):
        raise ValueError(
            "XLA cannot compile a step with collectives between CPU replicas. "
            f"Received: jit_compile=True and {strategy.num_replicas_in_sync} replicas, of which here "
            f"{', '.join(devices)}. Expected: jit_compile=False (or 'auto') on CPUs. "
            "Compile the model with `model.compile(..., jit_compile=False)`."
        )
    stray = first_variable_outside(model)
    if stray is not None:
        raise ValueError(
            "A variable was made outside of the strategy's scope, so that it is not on all replicas. "
            f"Received: {stray.path!r}, made outside of {type(strategy).__name__}.scope(). Expected: the model, its "
            "metrics (also the ones given to `compile`), the optimizer and `model.compile` within one "
            "`with strategy.scope():` block. Move them there."
        )
    optimizer = model.optimizer if training else None
    if optimizer is not None and not is_made_under(optimizer, strategy):
        raise ValueError(
            "The optimizer was made outside of the strategy's scope, so that its variables are not on all replicas. "
            f"Received: {type(optimizer).__name__} {optimizer.name!r}, made outside of "
            f"{type(strategy).__name__}.scope(). Expected: the model, the optimizer and `model.compile` within one "
            "`with strategy.scope():` block. Move them there."
        )
