"""The traced functions of the stages for one kind of step, and the divisors of its losses."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.model_parallel.loss_divisors import divisors_of
from tfdist.model_parallel.stage_functions import StageFunction, StageInputs, StageKind
from tfdist.model_parallel.stages import ModelStages


class StepFunctions:
    """The functions of all stages. Each is traced when the first micro-batch reaches its stage.

    Attributes:
        stages: The stages.
    """

    def __init__(
        self,
        model: Any,
        stages: ModelStages,
        kind: StageKind,
        batch: Any,
        chief: str,
        trace: Callable[..., Any] = StageFunction,
    ) -> None:
        """Prepares a step.

        Args:
            model: The Keras model.
            stages: Its stages.
            kind: Which functions are traced.
            batch: Of the complete batch the inputs as the graph has them, and inputs, targets and weights for losses.
            chief: The device of the divisors.
            trace: Creates the function of a stage, as `StageFunction` does.
        """
        self.stages = stages
        self._model, self._kind, self._batch, self._chief = model, kind, batch, chief
        self._trace = trace
        self._functions: dict[int, Any] = {}
        self._divisors: tf.Tensor | None = None

    def of(self, index: int, given: StageInputs) -> tuple[Any, StageInputs]:
        """Returns the function of a stage, and its arguments `given` with the divisors of the losses."""
        function = self._functions.get(index)
        if function is None:
            function = self._trace(self._model, self.stages, self.stages.stages[index], self._kind, given)
            self._functions[index] = function
            if function.num_divisors:
                with tf.control_dependencies(None), tf.device(self._chief):
                    number = function.num_divisors
                    self._divisors = divisors_of(self._model, self.stages.graph, self._batch, self._kind, number)
        return function, given._replace(divisors=self._divisors) if function.num_divisors else given

    def fixed_tables(self, index: int) -> set[int]:
        """Returns the positions of variables of a stage of which each micro-batch looks up the same rows."""
        return self._functions[index].fixed_tables
