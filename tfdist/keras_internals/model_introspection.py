"""What a training step asks a Keras model: its step, its inputs, the variables that a step changes."""

import inspect
import types
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import TensorFlowTrainer, trainer
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import hooks_of
from tfdist.tensorflow_internals.rows_per_replica import has_known_rows
from tfdist.tensorflow_internals.xla_functions import inlined, python_function_of


def bound_step(function: Any) -> tuple[Any, str] | tuple[None, None]:
    """Returns the model and the name of a bound `train_step` or `test_step`; `(None, None)` for other functions.

    The step may be decorated by `tf.function`.
    """
    function = python_function_of(function)
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, keras.Model) and name in ("train_step", "test_step"):
        return owner, name
    return None, None


def bound_to(model: Any, step_function: Any) -> Any:
    """Returns what Keras runs as a step of a model so that `bound_step` knows it: a decorator may hide the method."""
    if bound_step(step_function)[0] is not None:
        return step_function

    def run_step(_: Any, data: Any) -> Any:
        return inlined(step_function)(data)

    run_step.__name__ = "train_step" if step_function == model.train_step else "test_step"
    return types.MethodType(run_step, model)


def trace_step(function: Any, element_spec: Any) -> None:
    """Traces the graph in which a function of `fit` computes a batch, if the first batch would be traced alike.

    Args:
        function: What Keras' `make_train_function` has made.
        element_spec: The structure of `tf.TypeSpec`s of the batches. Other unknown sizes than the number of rows may
            change what a step computes, as Keras removes axes of size 1.
    """
    if not has_known_rows(element_spec):
        return
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    compute = next((cell.cell_contents for name, cell in cells if name == "one_step_on_data"), None)
    compiled: Any = getattr(compute, "__wrapped__", None)  # within a conversion of optional parts of the batch
    if hasattr(compiled, "get_concrete_function"):
        compiled.get_concrete_function(element_spec)


def has_own_step(model: Any) -> bool:
    """Whether a model has its own `train_step` or `test_step`, which may call it on other inputs than `fit` has."""
    model_class, stock = type(model), TensorFlowTrainer
    is_of_class = model_class.train_step is not stock.train_step or model_class.test_step is not stock.test_step
    return is_of_class or not {"train_step", "test_step"}.isdisjoint(vars(model))


def has_own_loss(model: Any) -> bool:
    """Whether a model computes its loss itself, so that it may give losses of Keras anything."""
    return has_own_step(model) or type(model).compute_loss is not keras.Model.compute_loss


def is_predict_step(function: Any) -> bool:
    """Whether `function` is the one that Keras runs on the replicas to predict a batch."""
    return "make_predict_function.<locals>.one_step_on_data" in getattr(function, "__qualname__", "")


def predicting_model(function: Any) -> Any:
    """Returns the model whose predictions the function computes for which `is_predict_step` is true, or None."""
    function = inspect.unwrap(function)
    cells = getattr(getattr(function, "python_function", function), "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, keras.Model)), None)


@patch
def patch_predictions() -> None:
    """Makes `predict_on_batch` predict every row once, and predictions come in the order of the rows.

    In Keras every replica predicts all rows of `predict_on_batch`, and predictions of `predict` are reordered by the
    number of this worker's replicas.
    """
    predict, concatenate = TensorFlowTrainer.predict_on_batch, trainer._multi_worker_concat

    @replace(TensorFlowTrainer, "predict_on_batch")
    def predict_rows_once(self: Any, x: Any) -> Any:
        strategy = self.distribute_strategy
        return predict(self, hooks_of(strategy).split_rows(strategy, x))

    @replace(trainer, "_multi_worker_concat")
    def concatenate_in_order(v: Any, strategy: Any) -> Any:
        keeps_order = hooks_of(strategy).keeps_order(strategy)
        return strategy.gather(v, axis=0) if keeps_order else concatenate(v, strategy)


def first_input(data: Any) -> Any:
    """Returns the input whose first dimension is the number of samples, as Keras counts them, or `None`."""
    inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
    return next((leaf for leaf in keras.tree.flatten(inputs) if leaf is not None), None)


def batch_statistics(model: Any) -> list[keras.Variable]:
    """Returns the moving means and variances of batch normalization layers that see only their replica's batches."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    local_layers = [layer for layer in layers if layer.trainable and layer.built and not layer.synchronized]
    return [variable for layer in local_layers for variable in (layer.moving_mean, layer.moving_variance)]


def averaged_states(model: Any) -> list[keras.Variable]:
    """Returns the states that replicas average: `batch_statistics`, and others that have `aggregation="mean"`."""
    states_by_id = {id(variable): variable for variable in batch_statistics(model)}
    means = [variable for variable in step_states(model) if variable.aggregation == "mean"]
    states_by_id |= {id(state): state for state in means if tf.as_dtype(state.dtype).is_floating}
    return list(states_by_id.values())


def step_states(model: Any) -> list[keras.Variable]:
    """Returns the variables that layers change in a step, except weights and sums: statistics, counts, seeds."""
    states_by_id: dict[int, keras.Variable] = {}
    for layer in model._flatten_layers():
        seeds = [generator.state for generator in layer._seed_generators]
        for variable in [*layer._non_trainable_variables, *seeds]:
            if variable.aggregation != "sum":
                states_by_id[id(variable)] = variable
    for metric in model.metrics:
        for variable in metric.variables:
            states_by_id.pop(id(variable), None)
    return list(states_by_id.values())


def seed_states(model: Any) -> set[int]:
    """Returns the ids of the variables with the states of the random generators of layers."""
    return {id(generator.state) for layer in model._flatten_layers() for generator in layer._seed_generators}


def added_losses(model: Any) -> dict[Any, list[Any]]:
    """Returns the losses that each layer has added in the step that is running."""
    return {layer: list(layer._losses) for layer in model._flatten_layers()}


def set_added_losses(losses: dict[Any, list[Any]]) -> None:
    """Replaces the losses that each layer has added by those that `added_losses` has returned."""
    for layer, added in losses.items():
        layer._losses[:] = added


def computes_over_all_replicas(model: Any) -> bool:
    """Whether a layer of the model uses the samples of all replicas: synchronized batch normalization."""
    return any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())


def accepts_zeros(model: Any, data: Any) -> bool:
    """Whether a replica without samples computes with one sample of zeros and not with none.

    Zeros may be invalid inputs if they are integers (an unknown id), and strings are empty. But convolutions and
    recurrent layers cannot compute without samples on every device.
    """
    inputs = keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(data)[0])
    if all(leaf is None or leaf.dtype.is_floating for leaf in inputs):
        return True
    layers = [] if model is None else model._flatten_layers()
    bases = {base.__name__ for layer in layers for base in type(layer).__mro__}
    return "RNN" in bases or any("Conv" in name for name in bases)


def is_made_under(optimizer: Any, strategy: Any) -> bool:
    """Whether `optimizer` was created in the scope of `strategy`."""
    return getattr(optimizer, "_distribution_strategy", None) is strategy
