"""Patches Keras for models in stages. Strategies of TensorFlow are not affected."""

import contextlib
from typing import Any

from tfdist.keras_internals.losses import patch_losses
from tfdist.keras_internals.rematerialization import patch_rematerialization
from tfdist.keras_internals.symbolic_build import patch_symbolic_build
from tfdist.model_parallel.micro_batch_loss import current_stage_loss

_is_patched = False


def patch_keras_once(strategy_class: Any) -> None:
    """Patches Keras for models under strategies of `strategy_class`, the model-parallel strategy."""
    global _is_patched
    if _is_patched:
        return
    patch_losses(current_stage_loss)
    patch_rematerialization(lambda: current_stage_loss() is not None)
    patch_symbolic_build(lambda strategy: isinstance(strategy, strategy_class), lambda _: contextlib.nullcontext())
    _is_patched = True
