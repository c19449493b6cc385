"""The private Keras symbols that tfdist uses, each with its reason, and how versions of Keras differ in them."""

from tfdist.private_symbols import has_reached, private

_TRAINER = "keras.src.backend.tensorflow.trainer"
_trainer_name, _base_name = (
    ("Trainer", "BaseTrainer") if has_reached("keras", "3.16") else ("TensorFlowTrainer", "Trainer")
)
_TRAINER_CLASS, BASE_TRAINER = f"{_TRAINER}:{_trainer_name}", f"keras.src.trainers.trainer:{_base_name}"

# How the names of the graphs begin in which Keras computes the shapes of layers (`compute_output_spec`).
SHAPE_GRAPH = "scratch_graph"
losses = private("keras.src.losses:loss", "scales losses by the number of replicas; has no hook for uneven batches")
compile_utils = private("keras.src.trainers:compile_utils", "keeps the mean of every output's loss")
trainer = private("keras.src.backend.tensorflow:trainer", "makes the epoch iterators of fit, evaluate and predict")
TensorFlowTrainer = private(_TRAINER_CLASS, "the trainer of models")
TFOptimizer = private(
    "keras.src.backend.tensorflow.optimizer:TFOptimizer", "clips before it reduces and averages on every micro-step"
)
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
_global_attribute = private(
    "keras.src.backend.common.global_state:get_global_attribute", "whether a layer's call is running"
)

# Replaced or called by name: if Keras renamed one, the replacement would have no effect.
for _path, _why in {
    "keras.src.losses.loss:scale_loss_for_distribution": "divides by the number of replicas, not by the samples",
    "keras.src.losses.loss:unscale_loss_for_distribution": "its inverse, for the logged loss",
    "keras.src.losses.loss:reduce_values": "does not scale a loss that the user has averaged",
    "keras.src.losses.loss:reduce_weighted_values": "normalises masked losses by the replica's own mask",
    "keras.src.trainers.compile_utils:get_loss": "does not scale a loss that overrides `__call__`",
    f"{_TRAINER}:TFEpochIterator": "takes the number of batches from the worker's own dataset",
    f"{_TRAINER_CLASS}.predict_on_batch": "makes every replica predict all rows",
    f"{_TRAINER_CLASS}._compute_loss": "does not show whether a loss was scaled",
    f"{_TRAINER_CLASS}._aggregate_additional_loss": "scales the sum of an `add_loss` of samples as a mean",
    f"{_TRAINER}:_multi_worker_concat": "orders predictions as if all workers had as many replicas as this one",
    "keras.src.random.seed_generator:SeedGenerator.next": "draws the same seeds on all replicas",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._overwrite_variables_directly_with_gradients": (
        "uses a replica's own value for all replicas"
    ),
    f"{_TRAINER_CLASS}._maybe_symbolic_build": "averages a batch of data over all workers",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._backend_apply_gradients": "the order of an update",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._get_current_learning_rate": "counts micro-steps",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._overwrite_variable_with_gradient": (
        "distinguishes new values from gradients"
    ),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._clip_gradients": "clips gradients",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._apply_weight_decay": "decays the weights",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._backend_update_step": "updates the variables",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients": "sums gradients over replicas",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._update_model_variables_moving_average": (
        "updates the moving averages of weights"
    ),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._overwrite_model_variables_with_average_value": (
        "replaces weights by their averages"
    ),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._get_variable_index": "finds a variable's accumulator",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._distributed_tf_update_step": (
        "sends gradients to the variables' servers without compression"
    ),
    f"{_TRAINER_CLASS}._make_function": "compiles whole steps, with collectives",
    f"{_TRAINER_CLASS}._resolve_auto_jit_compile": "is false under strategies",
    f"{_TRAINER_CLASS}.make_train_function": "draws batches in the function that trains",
    f"{_TRAINER_CLASS}.make_test_function": "as for training",
    f"{_TRAINER_CLASS}.make_predict_function": "as for training",
    f"{BASE_TRAINER}.get_metrics_result": "reads metrics while workers are still training",
    f"{BASE_TRAINER}.reset_metrics": "resets counts that workers keep",
    "keras.src.backend.tensorflow:Variable._initialize": "creates the value of a variable",
    "keras.src.models:Model._flatten_layers": "finds the layers with batch statistics",
}.items():
    private(_path, _why)


def is_in_layer_call() -> bool:
    """Whether a layer's `call` is running in this thread."""
    return _global_attribute("current_call_ctx") is not None
