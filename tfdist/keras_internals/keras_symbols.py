"""The private Keras symbols that tfdist uses, each with its reason, and how versions of Keras differ in them."""

from tfdist.private_symbols import has_reached, private, private_members

_TRAINER = "keras.src.backend.tensorflow.trainer"
_trainer_name, _base_name = (
    ("Trainer", "BaseTrainer") if has_reached("keras", "3.16") else ("TensorFlowTrainer", "Trainer")
)
_TRAINER_CLASS = f"{_TRAINER}:{_trainer_name}"
_OPTIMIZER_CLASS = "keras.src.backend.tensorflow.optimizer:TFOptimizer"

# How the names of the graphs begin in which Keras computes the shapes of layers (`compute_output_spec`).
SHAPE_GRAPH = "scratch_graph"
losses = private("keras.src.losses:loss", "scales losses by the number of replicas; has no hook for uneven batches")
compile_utils = private("keras.src.trainers:compile_utils", "keeps the mean of every output's loss")
trainer = private("keras.src.backend.tensorflow:trainer", "makes the epoch iterators of fit, evaluate and predict")
TensorFlowTrainer = private(_TRAINER_CLASS, "the trainer of models")
TFOptimizer = private(_OPTIMIZER_CLASS, "clips before it reduces and averages on every micro-step")
Variable = private("keras.src.backend.tensorflow:Variable", "creates a `tf.Variable`, which may not be split")
DataAdapter = private(
    "keras.src.trainers.data_adapters.data_adapter:DataAdapter", "accepts only TensorFlow's datasets and its own"
)
supports_jit = private("keras.src.trainers.trainer:model_supports_jit", "whether XLA can compile a model's layers")
LossFunctionWrapper = private(
    "keras.src.losses.losses:LossFunctionWrapper", "computes the losses of samples, which XLA may compile"
)
get_mask = private(
    "keras.src.backend.common.masking:get_keras_mask", "a mask leaves a compiled function as a tensor does"
)
stateless_scope = private(
    "keras.src.backend.common.stateless_scope:get_stateless_scope", "what collects the updates of variables"
)
AutocastScope = private(
    "keras.src.backend.common.variables:AutocastScope", "casts variables that an optimizer updates in a layer's call"
)
set_mask = private("keras.src.backend.common.masking:set_keras_mask", "likewise")
global_attribute = private(
    "keras.src.backend.common.global_state:get_global_attribute",
    "a running call of a layer, and the global seed generator",
)

private_members(
    {
        "keras.src.losses.loss": {
            "scale_loss_for_distribution": "divides by the number of replicas, not by the samples",
            "unscale_loss_for_distribution": "its inverse, for the logged loss",
            "reduce_values": "does not scale a loss that the user has averaged",
            "reduce_weighted_values": "normalises masked losses by the replica's own mask",
        },
        "keras.src.trainers.compile_utils": {"get_loss": "does not scale a loss that overrides `__call__`"},
        "keras.src.trainers.compile_utils:CompileLoss": {"Loss": "the loss of an output, with its place in them"},
        "keras.src.trainers.compile_utils:CompileMetrics": {"_flatten_y": "orders outputs as their metrics"},
        _TRAINER: {
            "TFEpochIterator": "takes the number of batches from the worker's own dataset",
            "_multi_worker_concat": "orders predictions as if all workers had as many replicas as this one",
        },
        _TRAINER_CLASS: {
            "_compute_loss": "does not show whether a loss was scaled",
            "_aggregate_additional_loss": "scales the sum of an `add_loss` of samples as a mean",
            "_maybe_symbolic_build": "averages a batch of data over all workers",
            "_make_function": "compiles whole steps, with collectives",
            "_resolve_auto_jit_compile": "is false under strategies",
        },
        f"keras.src.trainers.trainer:{_base_name}": {
            "_get_metrics_result_or_logs": "chooses the logs of an epoch, by default those of its last step",
            "_symbolic_build": "builds model, metrics and optimizer without a batch",
        },
        "keras.src.trainers.epoch_iterator:EpochIterator": {
            "_enumerate_iterator": "numbers the steps of an epoch from 0",
            "_get_iterator": "creates the iterators",
            "catch_stop_iteration": "surrounds the loop over an epoch",
            "reset": "discards the iterator with which the model was built",
        },
        _OPTIMIZER_CLASS: {
            "_overwrite_variables_directly_with_gradients": "uses a replica's own value for all replicas",
            "_backend_apply_gradients": "the order of an update",
            "_get_current_learning_rate": "counts micro-steps",
            "_overwrite_variable_with_gradient": "distinguishes new values from gradients",
            "_clip_gradients": "clips gradients",
            "_clip_by_norm": "clips one gradient, where its variable is",
            "_apply_weight_decay": "decays the weights",
            "_use_weight_decay": "whether a variable decays",
            "_backend_update_step": "updates the variables",
            "_all_reduce_sum_gradients": "sums gradients over replicas",
            "_update_model_variables_moving_average": "updates the moving averages of weights",
            "_overwrite_model_variables_with_average_value": "replaces weights by their averages",
            "_get_variable_index": "finds a variable's accumulator",
            "_distributed_tf_update_step": "sends gradients to the variables' servers without compression",
            "_track_variable": "lists the variables of an optimizer",
            "_var_key": "finds the slots of a variable",
        },
        "keras.src.optimizers.base_optimizer:BaseOptimizer": {
            "_check_variables_are_known": "rejects variables for which an optimizer was not built",
            "_filter_empty_gradients": "warns of variables without a gradient",
        },
        "keras.src.callbacks.swap_ema_weights:SwapEMAWeights": {
            "_tf_swap_variables": "adds to a `tf.Variable` of the average",
            "_tf_finalize_ema_values": "assigns to it",
        },
        "keras.src.backend.tensorflow:Variable": {
            "_initialize": "creates the value of a variable",
            "_initialize_with_initializer": "creates a complete value for parts",
            "_map_aggregation": "creates a part of a variable as Keras creates the whole",
            "_map_synchronization": "as for _map_aggregation",
            "_maybe_autocast": "casts a weight that was gathered",
            "_convert_to_tensor": "converts what is assigned to a split slot",
            "_serialize_to_tensors": "saves a `tf.Variable`, which a split slot is not",
            "_shared_name": "likewise names it",
            "_export_to_saved_model_graph": "likewise exports it",
            "_write_object_proto": "likewise",
            "_restore_from_tensors": "likewise restores it",
        },
        "keras.src.backend.tensorflow.core": {"remat": "rematerializes a call, and differentiates variables only"},
        "keras.src.layers.layer:Layer": {
            "_flatten_layers": "the layers inside of a layer",
            "_get_regularization_losses": "reads all weights at once, also those that are in parts",
        },
        "keras.src.models.functional:Functional": {"_standardize_inputs": "matches the data with the graph's inputs"},
        "keras.src.ops.function:Function": {"_run_through_graph": "the order of the calls, which is repeated here"},
        "keras.src.saving.saving_lib": {
            "is_memory_sufficient": "whether a model is written into memory first",
            "save_model": "opens the file at once, which other workers write, too",
            "save_weights_only": "likewise",
        },
        "keras.src.legacy.saving.legacy_h5_format": {"save_model_to_hdf5": "likewise"},
        "keras.src.utils.file_utils": {"makedirs": "fails if another worker has just created the directory"},
        "keras.src.utils.io_utils": {
            "ask_to_proceed_with_overwrite": "asks also if another worker has just written the file"
        },
    }
)


def is_in_layer_call() -> bool:
    """Whether a layer's `call` is running in this thread."""
    return global_attribute("current_call_ctx") is not None
