"""The patches that tfdist's strategies need, in one order, by the hooks of the strategy; moments over all replicas."""

from typing import Any

import tensorflow as tf

from tfdist.keras_internals.compiled_calls import patch_auto_jit_compile, patch_compiled_calls
from tfdist.keras_internals.epoch_iterator import patch_loops_over_epochs
from tfdist.keras_internals.keras_callbacks import patch_ends_of_loops, patch_lists_of_callbacks
from tfdist.keras_internals.losses import patch_losses
from tfdist.keras_internals.model_introspection import patch_predictions
from tfdist.keras_internals.optimizers import patch_optimizers
from tfdist.keras_internals.placed_variables import patch_variable_creation
from tfdist.keras_internals.rematerialization import patch_rematerialization
from tfdist.keras_internals.saved_files import patch_saving
from tfdist.keras_internals.scheduled_training import patch_embedding_layers, patch_optimizer_update_step, patch_trainer
from tfdist.keras_internals.seed_generators import patch_seed_generators
from tfdist.keras_internals.sharded_optimizers import patch_sharded_optimizers
from tfdist.keras_internals.statements_in_scope import patch_statements_in_scope
from tfdist.keras_internals.symbolic_build import patch_symbolic_build
from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import StrategyHooks, of_running_step, register_hooks
from tfdist.tensorflow_internals.merge_calls import patch_merge_calls
from tfdist.tensorflow_internals.rows_per_replica import patch_distributed_iterators
from tfdist.tensorflow_internals.runtime import copy_results_of_python_functions, patch_graph_reset


def patch_keras(strategy_class: type, hooks: StrategyHooks) -> None:
    """Makes Keras and TensorFlow ask strategies of a class for `hooks`. Strategies of TensorFlow are not affected."""
    register_hooks(strategy_class, hooks)
    # A later one is around an earlier one of the same attribute: losses around statements in scope.
    copy_results_of_python_functions()
    patch_graph_reset()
    patch_distributed_iterators()
    patch_merge_calls()
    patch_statements_in_scope()
    patch_losses()
    patch_auto_jit_compile()
    patch_compiled_calls()
    patch_optimizers()
    patch_optimizer_update_step()
    patch_sharded_optimizers()
    patch_variable_creation()
    patch_embedding_layers()
    patch_seed_generators()
    patch_synchronized_moments()
    patch_rematerialization()
    patch_saving()
    patch_trainer()
    patch_predictions()
    patch_loops_over_epochs()
    patch_ends_of_loops()
    patch_symbolic_build()
    patch_lists_of_callbacks()


_nn = private("keras.src.backend.tensorflow:nn", "calls the moments over all replicas")
_stock = private("keras.src.backend.tensorflow.nn:_compute_moments_sync", "counts the rows of replicas without samples")


@patch
def patch_synchronized_moments() -> None:
    """Leaves the rows of replicas without samples out of the moments over all replicas.

    These are the means and variances of synchronized batch normalization.
    """

    @replace(_nn, "_compute_moments_sync")
    def moments(x: Any, axes: Any, keepdims: bool) -> Any:
        context, counts = tf.distribute.get_replica_context(), of_running_step(lambda hooks: hooks.has_samples())
        return _stock(x, axes, keepdims) if counts is None or not context else _moments(x, axes, keepdims, counts)


def _moments(x: Any, axes: Any, keepdims: bool, counts: Any) -> tuple[tf.Tensor, tf.Tensor]:
    @tf.custom_gradient
    def without_gradient(*totals: tf.Tensor) -> Any:
        return [tf.identity(total) for total in totals], lambda *upstream: _or_zeros(upstream, counts)

    # The gradient of a number depends on whether it is static: some replicas would reduce it, and others not.
    rows = tf.stop_gradient(tf.ones_like(x))
    sums = [tf.reduce_sum(values, axis=axes, keepdims=True) for values in (x, tf.square(x), rows)]
    total, squares, number = without_gradient(
        *tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, _or_zeros(sums, counts))
    )
    mean = tf.math.divide_no_nan(total, number)
    variance = tf.maximum(tf.math.divide_no_nan(squares, number) - tf.square(mean), 0.0)
    return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))


def _or_zeros(values: Any, counts: Any) -> list[tf.Tensor]:
    return list(values) if counts is True else [tf.where(counts, value, tf.zeros_like(value)) for value in values]
