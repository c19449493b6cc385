"""The patches that tfdist's strategies need, in one order; each asks for the hooks of the strategy."""

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
from tfdist.keras_internals.split_weight import patch_split_weights
from tfdist.keras_internals.statements_in_scope import patch_statements_in_scope
from tfdist.keras_internals.symbolic_build import patch_symbolic_build
from tfdist.keras_internals.synchronized_moments import patch_synchronized_moments
from tfdist.strategy_hooks import StrategyHooks, register_hooks
from tfdist.tensorflow_internals.merge_calls import patch_merge_calls
from tfdist.tensorflow_internals.python_function_results import copy_results_of_python_functions
from tfdist.tensorflow_internals.rows_per_replica import patch_distributed_iterators
from tfdist.tensorflow_internals.runtime import patch_graph_reset


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
    patch_split_weights()
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
