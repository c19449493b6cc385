"""The models of a strategy: their stages, and where their variables are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.keras_internals.compiled_loss import variables_of_own_loss
from tfdist.keras_internals.functional_graph import graph_of
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


class PlacedModels:
    """Cuts and places each model of a strategy when its first step is traced."""

    def __init__(
        self,
        strategy: Any,
        pipeline: Pipeline,
        columns: Callable[[], Columns],
        chief: str,
        reduction: ColumnReduction,
        counters: LinkCounters,
    ) -> None:
        """Creates the collection.

        Args:
            strategy: The strategy, with a `PlacedExtended`.
            pipeline: The options of the pipeline.
            columns: Creates the columns of a model that is not placed yet.
            chief: The device of batches and scalars.
            reduction: Sums the gradients of the columns.
            counters: Count what the steps send.
        """
        self._strategy = strategy
        self._pipeline, self._columns, self._chief = pipeline, columns, chief
        self._reduction, self._counters = reduction, counters

    def stages_of(self, model: Any) -> ModelStages | None:
        """Returns the stages of a model of which a step was traced before, else None."""
        placed = self._placed(model)
        return None if placed is None else placed.stages

    def _placed(self, model: Any) -> _Placed | None:
        owner, placed = vars(model).get(_ATTRIBUTE, (None, None))
        return placed if owner is self else None

    def step(self, model: Any, x: Any, name: str) -> PipelineStep:
        """Returns the steps of a model whose variables, also new ones, are in their place.

        Args:
            model: The Keras model.
            x: The inputs of a batch.
            name: Which of them is used: "train_step", "test_step" or "predict_step".

        Raises:
            ValueError: The model has no graph, or too few layers, or cannot be trained in its columns.
        """
        with tf.init_scope(), tf.device(None), self._strategy.scope():
            graph = graph_of(model, x)
            placed, of_loss = self._placed(model), variables_of_own_loss(model)
            # Layers may get other variables, as by `enable_lora`.
            variables = [*(variable for call in graph.calls for variable in call.variables), *of_loss]
            signature = [*graph.signature(), *map(id, variables)]
            if placed is None or placed.signature != signature:
                placed = _Placed(signature, stages_of(graph, self._pipeline, of_loss), self._columns())
                # An attribute, as the stages refer to the model. Keras does not track it.
                object.__setattr__(model, _ATTRIBUTE, (self, placed))
            placed.columns.place(model, placed.stages, self._chief, self._strategy.extended.colocated_with)
            placed.columns.check(model, name)
        options = (self._pipeline, self._chief, self._reduction, self._counters)
        return PipelineStep(model, placed.stages, placed.columns, *options)
