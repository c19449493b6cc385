"""Gradient accumulation of a Keras optimizer: reads and changes the number of micro-steps of an update."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.model_state import components
from tfdist.keras_internals.optimizers import LossScale, OptimizerUpdate
from tfdist.keras_internals.placed_variables import optimizer_and_loss_scale


class Accumulation:
    """The accumulation of a model's optimizer, or of the inner one of a `keras.optimizers.LossScaleOptimizer`.

    Attributes:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._outer = model.optimizer
        self._optimizer, _ = optimizer_and_loss_scale(self._outer)

    @property
    def strategy(self) -> Any:
        """The strategy in whose scope the optimizer was created."""
        return self._optimizer._distribution_strategy

    @property
    def steps(self) -> int:
        """Number of micro-steps of an update."""
        return int(self._optimizer.gradient_accumulation_steps or 1)

    @property
    def remainder(self) -> int:
        """Number of micro-steps accumulated since the last update."""
        return int(self._micro_steps % self.steps)

    @property
    def averages_weights(self) -> bool:
        """Whether the optimizer replaces the weights by their moving average when training ends."""
        return bool(self._optimizer.use_ema)

    @property
    def optimizers(self) -> list[Any]:
        return [self._outer] if self._outer is self._optimizer else [self._outer, self._optimizer]

    def update(self) -> OptimizerUpdate:
        """Returns an update of all trainable variables, for use in a replica context."""
        loss_scale = None if self._outer is self._optimizer else LossScale(self._outer)
        return OptimizerUpdate(self._optimizer, self._optimizer._trainable_variables, loss_scale)

    def leave_to_tfdist(self) -> None:
        """Prepares for tfdist's micro-steps after some of Keras' own; the step is traced again.

        tfdist accumulates gradients of the scaled loss, Keras unscales them first.
        """
        if self._outer is not self._optimizer and self._optimizer.built and self.remainder:
            scale = LossScale(self._outer).value
            for accumulator in self._optimizer._accumulated_gradients:
                for component in components(self.strategy, accumulator):
                    component.assign(component * tf.cast(scale, component.dtype))
        self.model.make_train_function(force=True)

    def change(self, steps: int) -> None:
        """Changes the number of micro-steps of the next and later updates; the accumulators must be empty.

        The number of updates, which schedules and Adam use, stays the same. The optimizer then has the same variables
        in the same order as one that was created with `steps`, so it can load what such an optimizer has saved.
        """
        if steps == self.steps:
            return
        updates = self._micro_steps // self.steps
        had_accumulators = self.steps > 1
        self._optimizer.gradient_accumulation_steps = steps if steps > 1 else None
        if self._optimizer.built and had_accumulators != (steps > 1):
            self._add_accumulators() if steps > 1 else self._remove_accumulators()
        self._optimizer._iterations.assign(updates * steps)
        self.model.make_train_function(force=True)

    def complete(self) -> None:
        """Counts a remainder that has been applied as a full update."""
        missing = -self._micro_steps % self.steps
        self._optimizer._iterations.assign_add(missing)

    @property
    def _micro_steps(self) -> int:
        return int(self._optimizer._iterations.numpy())

    def _add_accumulators(self) -> None:
        optimizer = self._optimizer
        variables_before = list(optimizer._variables)
        with self.strategy.scope(), keras.name_scope(optimizer.name):
            accumulators = [
                optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
                for variable in optimizer._trainable_variables
            ]
        optimizer._accumulated_gradients = accumulators
        # Keras creates them after the iterations, the learning rate and the averages, before the slots.
        learning_rate = isinstance(optimizer._learning_rate, keras.Variable)
        averages = len(optimizer._model_variables_moving_average) if optimizer.use_ema else 0
        first = 1 + learning_rate + averages
        self._order_variables(variables_before[:first] + accumulators + variables_before[first:])

    def _remove_accumulators(self) -> None:
        optimizer = self._optimizer
        removed = {id(variable) for variable in optimizer._accumulated_gradients}
        self._order_variables([variable for variable in optimizer._variables if id(variable) not in removed])
        optimizer._accumulated_gradients = []

    def _order_variables(self, variables: list[Any]) -> None:
        # TensorFlow's tracked list can only grow, so a new list replaces it, in Keras' tracker, too.
        optimizer = self._optimizer
        optimizer._variables = variables
        is_variable, _ = optimizer._tracker.config["variables"]
        optimizer._tracker.config["variables"] = (is_variable, optimizer._variables)
