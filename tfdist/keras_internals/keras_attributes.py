"""The private attributes of Keras' objects that tfdist uses, each with its reason and a small object that has it.

Importing this creates nothing. `check_attributes` does, in the canaries of untested versions and in the tests.
"""

import tempfile
import types
from typing import Any

import keras
import numpy as np

from tfdist.keras_internals.keras_symbols import trainer
from tfdist.private_symbols import private_attributes


def _data() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((2, 1), "float32"), np.zeros((2, 1), "float32")


def _compiled() -> keras.Model:
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    return model


def _validating() -> Any:
    """What a model has while it is validated in `fit`."""
    during: dict[str, Any] = {}

    class Snapshot(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            during.update(vars(self.model))

    _compiled().fit(*_data(), validation_data=_data(), verbose=0, callbacks=[Snapshot()])
    return types.SimpleNamespace(**during)


def _built(owner: Any, *arguments: Any) -> Any:
    owner.build(*arguments)
    return owner


def _built_for_values(owner: Any) -> Any:
    return _built(owner, keras.ops.zeros((2, 1)), keras.ops.zeros((2, 1)))


def _sequential() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def _epoch_iterator() -> Any:
    model = _compiled()
    x, y = _data()
    return trainer.TFEpochIterator(x=x, y=y, batch_size=1, distribute_strategy=model.distribute_strategy)


def _exported() -> Any:
    """What holds the variables of an exported model."""
    with tempfile.TemporaryDirectory() as directory:
        archive = keras.export.ExportArchive()
        model = _sequential()
        archive.track(model)
        archive.add_endpoint("serve", model.call, [keras.InputSpec(shape=(1, 1), dtype="float32")])
        archive.write_out(directory, verbose=False)
    return archive._tf_trackable


private_attributes(
    "keras:Layer()",
    {
        "_trainable_variables": "a layer's own weights, without those of inner layers",
        "_non_trainable_variables": "a layer's own other variables",
        "_seed_generators": "the random state of a layer",
        "_losses": "the added losses of a call, of which a rejected or repeated one leaves none",
        "_loss_ids": "as for `_losses`",
        "_metrics": "a model's own metrics, without the compiled ones",
        "_call_has_training_arg": "whether `training` is passed to a model's call",
        "_call_has_mask_arg": "whether a model's call gets the masks that its layers would get",
        "_convert_input_args": "whether a model casts its inputs",
        "_remat_mode": "whether a layer is computed again in the backward pass",
        "_kernel": "the variable of the kernel; `kernel` is a value that LoRA may change",
    },
    lambda: _built(keras.layers.Dense(1), (None, 1)),
)
private_attributes(
    "keras.layers:Embedding()",
    {"_embeddings": "the variable of the table; `embeddings` is a value"},
    lambda: _built(keras.layers.Embedding(1, 1)),
)
private_attributes(
    "keras.layers:MultiHeadAttention()",
    {
        "_query_dense": "a projection whose results have an axis of heads",
        "_key_dense": "as for `_query_dense`",
        "_value_dense": "as for `_query_dense`",
        "_output_dense": "joins the heads",
        "_dropout_layer": "drops scores",
    },
    lambda: _built(keras.layers.MultiHeadAttention(1, 1, dropout=0.5), (None, 1, 1), (None, 1, 1)),
)
private_attributes(
    "keras:Model()",
    {
        "_compile_loss": "the compiled losses",
        "_compile_metrics": "the compiled metrics",
        "_loss_tracker": "the mean of the losses, which counts samples",
        "_initial_epoch": "the epoch with which a resumed `fit` begins",
        "_nodes_by_depth": "the calls of layers in their order",
        "_inputs_struct": "the structure of a model's inputs",
        "_outputs_struct": "the structure of a model's outputs",
    },
    _compiled,
)
private_attributes("keras:Sequential()", {"_functional": "the graph of its layers"}, _sequential)
private_attributes(
    "keras:Model().fit()", {"_eval_epoch_iterator": "the data of the validation that `fit` runs"}, _validating
)
private_attributes(
    "keras.src.trainers.compile_utils:CompileLoss()",
    {
        "_flat_losses": "the losses of outputs, which are replaced while shards compute them",
        "_y_pred_build_structure": "the structure of the outputs",
    },
    lambda: _built_for_values(_compiled()._compile_loss),
)
private_attributes(
    "keras.src.trainers.compile_utils:CompileMetrics()",
    {"_flat_metrics": "the metrics of outputs", "_flat_weighted_metrics": "the weighted metrics of outputs"},
    lambda: _built_for_values(_compiled()._compile_metrics),
)
private_attributes(
    "keras.losses:SparseCategoricalCrossentropy()",
    {"_fn_kwargs": "the arguments of a loss, which shards compute"},
    keras.losses.SparseCategoricalCrossentropy,
)
private_attributes(
    "keras.metrics:SparseCategoricalAccuracy()",
    {"_fn": "is replaced where shards know the predicted class only"},
    keras.metrics.SparseCategoricalAccuracy,
)
private_attributes(
    "keras.ops:softmax()",
    {"_keras_logits": "the logits, with which a cross-entropy is computed"},
    lambda: keras.activations.softmax(keras.ops.zeros((1, 2))),
)
private_attributes(
    "keras.optimizers:Optimizer()",
    {
        "_iterations": "counts micro-steps; `iterations` counts updates",
        "_learning_rate": "is the schedule or the variable; `learning_rate` is the value",
        "_trainable_variables": "what it updates",
        "_trainable_variables_indices": "finds the average of a weight",
        "_variables": "its variables, in an order that accumulators must keep, without those of an inner optimizer",
        "_tracker": "keeps the list of `_variables`, too",
        "_model_variables_moving_average": "the averages of weights",
        "_accumulated_gradients": "the accumulators, by variable",
        "_distribution_strategy": "the strategy under which it was created",
    },
    lambda: _built(keras.optimizers.SGD(use_ema=True, gradient_accumulation_steps=2), [keras.Variable([0.0])]),
)
private_attributes(
    "keras.optimizers:Nadam()",
    {"_u_product": "a state of no variable, equal on all replicas"},
    lambda: _built(keras.optimizers.Nadam(), [keras.Variable([0.0])]),
)
private_attributes(
    "keras:Variable()",
    {
        "_value": "the `tf.Variable`, which is replaced by what a replica or a worker holds",
        "_dtype": "the dtype; `dtype` is another one within autocast",
        "_shape": "the shape before there is a value",
        "_autocast": "whether layers cast it",
    },
    lambda: keras.Variable([0.0]),
)
private_attributes(
    "keras.src.backend.tensorflow.trainer:TFEpochIterator()",
    {
        "_distribute_strategy": "the strategy of an epoch",
        "_distributed_dataset": "the dataset of an epoch",
        "_num_batches": "the number of batches of an epoch, if it is known",
    },
    _epoch_iterator,
)
private_attributes(
    "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter()",
    {"_shuffle": "the `shuffle` of `fit`"},
    lambda: _epoch_iterator().data_adapter,
)
private_attributes(
    "keras.callbacks:TensorBoard()",
    {"_writers": "the files to flush before a process is replaced"},
    # Its writers create the directory, but only when something is logged.
    lambda: keras.callbacks.TensorBoard(tempfile.gettempdir(), write_graph=False),
)
private_attributes(
    "keras.export:ExportArchive()._tf_trackable",
    {"_all_variables": "the order in which variables are exported"},
    _exported,
)
