"""The models of a strategy: their stages, where their variables are, and which cannot have split variables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.compiled_loss import variables_of_own_loss
from tfdist.keras_internals.functional_graph import graph_of
from tfdist.keras_internals.placed_variables import optimizers_of
from tfdist.keras_internals.whole_values import GATHERING
from tfdist.model_parallel.column_reduction import ColumnReduction
from tfdist.model_parallel.columns import Columns
from tfdist.model_parallel.link_counters import LinkCounters
from tfdist.model_parallel.pipeline import Pipeline
from tfdist.model_parallel.pipeline_step import PipelineStep
from tfdist.model_parallel.placement import place
from tfdist.model_parallel.shard_columns import ShardColumns
from tfdist.model_parallel.shard_layout import ShardLayout
from tfdist.model_parallel.stages import ModelStages, stages_of

_ATTRIBUTE = "_tfdist_stages"


@dataclass(frozen=True)
class _Placed:
    signature: list[Any]
    stages: ModelStages
    columns: Columns


class PlacedModels:
    """Cuts and places each model of a strategy when its first step is traced."""

    def __init__(
        self,
        strategy: Any,
        pipeline: Pipeline,
        devices: Sequence[Sequence[str]],
        chief: str,
        reduction: ColumnReduction,
        counters: LinkCounters,
        layout: ShardLayout | None = None,
    ) -> None:
        """Creates the collection.

        Args:
            strategy: The strategy, with a `PlacedExtended`.
            pipeline: The options of the pipeline.
            devices: By column and stage.
            chief: The device of batches and scalars.
            reduction: Sums the gradients of the columns.
            counters: Count what the steps send.
            layout: Which variables neighbouring columns split, or None.
        """
        self._layout = layout
        self._strategy = strategy
        self._pipeline, self._devices, self._chief = pipeline, devices, chief
        self._reduction, self._counters = reduction, counters

    def stages_of(self, model: Any) -> ModelStages | None:
        """Returns the stages of a model of which a step was traced before, else None."""
        placed = self._placed(model)
        return None if placed is None else placed.stages

    def _placed(self, model: Any) -> _Placed | None:
        owner, placed = vars(model).get(_ATTRIBUTE, (None, None))
        return placed if owner is self else None

    def _columns(self) -> Columns:
        if self._layout is None or self._layout.ways == 1:
            return Columns(self._devices)
        return ShardColumns(self._devices, self._layout)

    def step(self, model: Any, x: Any, name: str) -> PipelineStep:
        """Returns the steps of a model whose variables, also new ones, are in their place.

        Args:
            model: The Keras model.
            x: The inputs of a batch.
            name: Which of them is used: "train_step", "test_step" or "predict_step".

        Raises:
            ValueError: The model has no graph, or too few layers, or cannot be trained with split variables.
        """
        with tf.init_scope(), tf.device(None), self._strategy.scope():
            graph = graph_of(model, x)
            placed, of_loss = self._placed(model), variables_of_own_loss(model)
            # Layers may get other variables, as by `enable_lora`.
            variables = [*(one for call in graph.calls for one in call.variables), *of_loss]
            signature = [*graph.signature(), *map(id, variables)]
            if placed is None or placed.signature != signature:
                placed = _Placed(signature, stages_of(graph, self._pipeline, of_loss), self._columns())
                # An attribute, as the stages refer to the model. Keras does not track it.
                object.__setattr__(model, _ATTRIBUTE, (self, placed))
            colocated_with = self._strategy.extended.colocated_with
            placed.columns.weight_of_slot = dict(colocated_with)  # those of new slots
            placed.columns.move_parts(model, placed.stages)
            place(model, placed.stages, self._devices[0], self._chief, colocated_with)
            placed.columns.copy(model, placed.stages)
            check_split_variables(model, placed.columns.axes, name)
        options = (self._pipeline, self._chief, self._reduction, self._counters)
        return PipelineStep(model, placed.stages, placed.columns, *options)


_OPTIMIZERS = (
    *(keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Adamax),
    *(keras.optimizers.Nadam, keras.optimizers.RMSprop, keras.optimizers.Adagrad, keras.optimizers.Adadelta),
    *(keras.optimizers.Ftrl, keras.optimizers.Lion, keras.optimizers.Lamb),
    *GATHERING,
)
_REGULARIZERS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def check_split_variables(model: Any, axes: Mapping[int, int], step: str) -> None:
    """Raises an error if a step would compute something else on parts of variables than on complete ones.

    Args:
        model: The Keras model.
        axes: By the id of a split variable its axis.
        step: "train_step", "test_step" or "predict_step".

    Raises:
        ValueError: The message gives the reason and the remedy.
    """
    if step != "train_step" or not axes:
        return
    optimizer, _ = optimizers_of(model.optimizer)
    if type(optimizer) not in _OPTIMIZERS:
        name = type(optimizer).__name__
        raise ValueError(
            "An optimizer cannot update split variables, because its update of an element may depend on the complete "
            f"variable. Received: {name} with a layout map; what it needs is not known. "
            f"Expected: one of {', '.join(one.__name__ for one in _OPTIMIZERS)}. Use one of them, or leave out "
            "`layout_map`."
        )
    for variable in model.trainable_variables:
        if id(variable) not in axes:
            continue
        regularizer, constraint = getattr(variable, "regularizer", None), getattr(variable, "constraint", None)
        is_elementwise = constraint is None or type(constraint) is keras.constraints.NonNeg
        if not is_elementwise or not (regularizer is None or type(regularizer) in _REGULARIZERS):
            found = regularizer if is_elementwise else constraint
            raise ValueError(
                "A split variable has a regularizer or constraint that needs all of it. Received: "
                f"{type(found).__name__} of {variable.path!r}. Expected: the regularizers L1, L2 and L1L2 and the "
                "constraint NonNeg. Exclude this path from the layout map, or replace them."
            )
