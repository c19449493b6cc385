"""The models of a strategy: whether their steps can run in stages, their stages, and where their variables are."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import overridden_method, overrides_compute_loss, variables_of_own_loss
from tfdist.keras_internals.functional_graph import graph_of
from tfdist.keras_internals.keras_updates import overridden_update
from tfdist.keras_internals.layer_calls import layers_inside
from tfdist.keras_internals.model_introspection import is_made_under
from tfdist.keras_internals.placed_variables import held_variable, optimizer_and_loss_scale
from tfdist.pipeline.column_reduction import ColumnReduction
from tfdist.pipeline.columns import Columns
from tfdist.pipeline.pipeline import Pipeline
from tfdist.pipeline.pipeline_step import PipelineStep
from tfdist.pipeline.stages import ModelStages, stages_of
from tfdist.pipeline.transfers import LinkCounters

_ATTRIBUTE = "_tfdist_stages"


@dataclass(frozen=True)
class _Placed:
    signature: list[Any]
    stages: ModelStages
    columns: Columns


@dataclass(frozen=True, eq=False)
class PlacedModels:
    """Cuts and places each model of a strategy, with a `PlacedExtended`, when its first step is traced."""

    strategy: Any
    pipeline: Pipeline
    new_columns: Callable[[], Columns]  # of a model that is not placed yet
    chief: str
    reduction: ColumnReduction
    counters: LinkCounters

    def stages_of(self, model: Any) -> ModelStages | None:
        """Returns the stages of a model of which a step was traced before, else None."""
        placed = self._placed(model)
        return None if placed is None else placed.stages

    def _placed(self, model: Any) -> _Placed | None:
        owner, placed = vars(model).get(_ATTRIBUTE, (None, None))
        return placed if owner is self else None

    def step(self, model: Any, x: Any, name: str) -> PipelineStep:
        """Returns the steps of a model for inputs like `x`, whose variables, also new ones, are in their place."""
        with tf.init_scope(), tf.device(None), self.strategy.scope():
            graph = graph_of(model, x)
            placed, of_loss = self._placed(model), variables_of_own_loss(model)
            # Layers may get other variables, as by `enable_lora`.
            variables = [*(variable for call in graph.calls for variable in call.variables), *of_loss]
            signature = [*graph.signature(), *map(id, variables)]
            if placed is None or placed.signature != signature:
                placed = _Placed(signature, stages_of(graph, self.pipeline, of_loss), self.new_columns())
                # An attribute, as the stages refer to the model. Keras does not track it.
                object.__setattr__(model, _ATTRIBUTE, (self, placed))
            placed.columns.place(model, placed.stages, self.chief, self.strategy.extended.colocated_with)
            placed.columns.check(model, name)
        options = (self.pipeline, self.chief, self.reduction, self.counters)
        return PipelineStep(model, placed.stages, placed.columns, *options)


def check_model_for_stages(model: Any, strategy: Any, step: str) -> None:
    """Raises an error if a step of `model`, such as "train_step", cannot run in stages."""
    if tf.executing_eagerly():
        raise ValueError(
            "Stages run in a compiled function. Received: a model with run_eagerly=True, or "
            "`tf.config.run_functions_eagerly(True)`. Expected: graph mode. Leave out `run_eagerly`, and debug the "
            "model without the strategy."
        )
    if model.jit_compile is True:
        raise ValueError(
            "XLA cannot compile a step whose stages are on several devices. Received: jit_compile=True. Expected: "
            "jit_compile=False in `compile`, or the default."
        )
    own = overridden_method(model, step)
    if own is not None:
        raise ValueError(
            f"A model with its own `{own}` cannot be cut into stages, because that method computes the complete model "
            f"at once. Received: {type(model).__name__}.{own}. Expected: the method of keras.Model. Move the loss into "
            "`compile` or `add_loss`, or use a data-parallel strategy."
        )
    if step != "predict_step":
        _check_own_loss(model)
    if step == "train_step":
        _check_optimizer(model, strategy)
    for reason, layer in _unsupported_layers(model):
        raise ValueError(
            f"A layer cannot compute a batch in micro-batches: {reason}. Received: {type(layer).__name__} "
            f"{layer.name!r}. Expected: a layer whose samples do not depend on each other or on earlier batches. "
            "Replace the layer, or use a data-parallel strategy."
        )


def _check_optimizer(model: Any, strategy: Any) -> None:
    if model.optimizer is None or not is_made_under(model.optimizer, strategy):
        raise ValueError(
            "The optimizer was created outside the strategy's scope. Received: "
            f"{'no optimizer' if model.optimizer is None else repr(model.optimizer.name)}. Expected: the model, the "
            "optimizer and `model.compile` within one `with strategy.scope():` block. Move them there."
        )
    optimizer, _ = optimizer_and_loss_scale(model.optimizer)
    method = overridden_update(optimizer)
    if method is not None:
        raise ValueError(
            f"An optimizer with its own `{method}` cannot update stages, because each stage updates its own variables. "
            f"Received: {type(optimizer).__name__}.{method}. Expected: an optimizer that overrides `update_step` "
            "only."
        )
    variables = model.trainable_variables
    overwritten = [variable.path for variable in variables if getattr(variable, "overwrite_with_gradient", False)]
    if overwritten:
        raise ValueError(
            "Variables of float8 layers cannot be trained in stages. Received: "
            f"{overwritten[0]!r}, whose gradient is its new value. Expected: layers in float32, bfloat16 or float16. "
            "Do not quantize layers to float8."
        )


def _check_own_loss(model: Any) -> None:
    is_regularized = any(getattr(variable, "regularizer", None) for variable in model.trainable_variables)
    if is_regularized and overrides_compute_loss(model):
        raise ValueError(
            "A model with its own `compute_loss` cannot have weight regularizers in stages, because its loss is "
            f"computed on the last stage. Received: {type(model).__name__}.compute_loss and a regularizer. Expected: "
            "one of them. Use weight decay of the optimizer instead of regularizers, or a loss in `compile`."
        )


def _unsupported_layers(model: Any) -> Iterator[tuple[str, Any]]:
    for layer in [model, *layers_inside(model)]:
        if getattr(layer, "synchronized", False):
            yield "it uses the statistics of the complete batch (synchronized=True)", layer
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            yield "it passes states from batch to batch (stateful=True)", layer


def variable_bytes_by_device(model: Any) -> dict[str, int]:
    """Returns by the full name of a device the bytes of weights and of the optimizer's variables on it.

    Copies in other columns, and the parts of split variables, count where they are.
    """
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
    by_device: dict[str, int] = defaultdict(int)
    for variable in {id(variable): variable for variable in variables}.values():
        held = held_variable(variable)
        for on_device in getattr(held, "in_columns", (held,)):
            by_device[on_device.device] += math.prod(on_device.shape) * on_device.dtype.size
    return dict(by_device)
