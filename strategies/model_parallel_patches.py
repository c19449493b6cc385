"""Patches Keras for models in stages. Strategies of TensorFlow are not affected."""

import contextlib
import functools
import warnings
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.auto_jit_compile import patch_auto_jit_compile
from tfdist.keras_internals.created_parts import NewValue, patch_creation_from_initializers
from tfdist.keras_internals.epoch_iterator import patch_errors_of_steps
from tfdist.keras_internals.losses import patch_losses
from tfdist.keras_internals.model_introspection import strategy_of
from tfdist.keras_internals.optimizers import patch_learning_rates
from tfdist.keras_internals.rematerialization import patch_rematerialization
from tfdist.keras_internals.saving_memory import patch_saving
from tfdist.keras_internals.symbolic_build import patch_symbolic_build
from tfdist.model_parallel.micro_batch_loss import MicroBatchLoss, current_stage_loss
from tfdist.tensorflow_internals.python_function_results import copy_results_of_python_functions
from tfdist.tensorflow_internals.runtime import patch_graph_reset

_is_patched = False


def patch_keras_once(strategy_class: Any) -> None:
    """Patches Keras for models under strategies of `strategy_class`, the model-parallel strategy."""
    global _is_patched
    if _is_patched:
        return

    def is_ours(strategy: Any) -> bool:
        return isinstance(strategy, strategy_class)

    def explain(strategy: Any, error: BaseException) -> None:
        if not is_ours(strategy) or not isinstance(error, tf.errors.OpError):
            return
        if strategy.servers:
            strategy.servers.explain(error)
        if isinstance(error, tf.errors.CancelledError):
            raise _failed_stage(error) from error

    def create(new: NewValue) -> Any:
        strategy = tf.distribute.get_strategy()
        return strategy._create_in_parts(new) if is_ours(strategy) and strategy._create_in_parts else None

    copy_results_of_python_functions()
    patch_creation_from_initializers(create)
    patch_errors_of_steps(explain)
    patch_auto_jit_compile(is_ours)
    patch_graph_reset(is_ours)
    patch_losses(current_stage_loss)
    patch_saving(lambda model: is_ours(getattr(model, "distribute_strategy", None)))
    patch_learning_rates(lambda optimizer: is_ours(strategy_of(optimizer)))

    def is_recomputed() -> bool | None:
        loss = current_stage_loss()
        if isinstance(loss, MicroBatchLoss):
            if not loss.recomputes:
                _warn_not_recomputed()
            return loss.recomputes
        return False if loss is not None or is_ours(tf.distribute.get_strategy()) else None

    patch_rematerialization(is_recomputed)
    patch_symbolic_build(is_ours, lambda _: contextlib.nullcontext())
    _is_patched = True


@functools.cache
def _warn_not_recomputed() -> None:
    warnings.warn(
        "Rematerialized layers keep their intermediate results in stages with a layout map. Received: layers under "
        "`keras.RematScope`, or functions of `keras.remat`, with `layout_map`. Expected: stages without a layout map, "
        "which compute them again in the backward pass. The numbers are equal; use more stages or micro-batches if the "
        "memory does not suffice.",
        stacklevel=2,
    )


def _failed_stage(error: tf.errors.CancelledError) -> tf.errors.CancelledError:
    """Returns the error of a step in which another operation failed than TensorFlow reports."""
    return tf.errors.CancelledError(
        None,
        None,
        "An operation of a stage has failed, and TensorFlow reports only another one that waited for it. Received: "
        f"{str(error.message).strip().splitlines()[-1]!r}. Expected: a batch that all layers can compute; an id beyond "
        'the rows of an embedding is a frequent cause. The log names the operation, in the first line with "aborting '
        'with status", unless TF_CPP_MIN_LOG_LEVEL is above 1. So does `model.predict` on this batch without the '
        "strategy.",
    )
