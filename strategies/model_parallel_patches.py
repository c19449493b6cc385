"""Patches Keras for models in stages. Strategies of TensorFlow are not affected."""

import contextlib
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.epoch_iterator import patch_errors_of_steps
from tfdist.keras_internals.losses import patch_losses
from tfdist.keras_internals.optimizers import patch_learning_rates
from tfdist.keras_internals.rematerialization import patch_rematerialization
from tfdist.keras_internals.saving_memory import patch_saving
from tfdist.keras_internals.symbolic_build import patch_symbolic_build
from tfdist.model_parallel.micro_batch_loss import MicroBatchLoss, current_stage_loss

_is_patched = False


def patch_keras_once(strategy_class: Any) -> None:
    """Patches Keras for models under strategies of `strategy_class`, the model-parallel strategy."""
    global _is_patched
    if _is_patched:
        return

    def name_lost_workers(strategy: Any, error: BaseException) -> None:
        if isinstance(strategy, strategy_class) and isinstance(error, tf.errors.OpError) and strategy.servers:
            strategy.servers.explain(error)

    patch_errors_of_steps(name_lost_workers)
    patch_losses(current_stage_loss)
    patch_saving(lambda model: isinstance(getattr(model, "distribute_strategy", None), strategy_class))
    patch_learning_rates(lambda optimizer: isinstance(optimizer._distribution_strategy, strategy_class))

    def is_recomputed() -> bool | None:
        loss = current_stage_loss()
        is_ours = loss is not None or isinstance(tf.distribute.get_strategy(), strategy_class)
        return isinstance(loss, MicroBatchLoss) if is_ours else None

    patch_rematerialization(is_recomputed)
    patch_symbolic_build(lambda strategy: isinstance(strategy, strategy_class), lambda _: contextlib.nullcontext())
    _is_patched = True
