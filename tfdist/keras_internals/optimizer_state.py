"""What a Keras optimizer consists of: its variables, its accumulators, and what gives them their meaning."""

from typing import Any

import keras


class OptimizerState:
    """The variables of one optimizer, without those of optimizers that it wraps."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self._optimizer).__name__

    @property
    def meaning(self) -> dict[str, Any]:
        """What decides on the meaning of the variables: all switches, whether there is a schedule, the loss's factor.

        Numbers such as decays are left to the user, who may change them on purpose. (The rate is a variable.)
        """
        config = self._optimizer.get_config()
        rate = getattr(self._optimizer, "_learning_rate", None)
        meaning: dict[str, Any] = {name: value for name, value in config.items() if isinstance(value, bool)}
        meaning["learning_rate"] = "variable" if isinstance(rate, keras.Variable) else type(rate).__name__
        if isinstance(config.get("loss_scale_factor"), int | float):
            meaning["loss_scale_factor"] = float(config["loss_scale_factor"])
        return meaning

    @property
    def learning_rate(self) -> float | None:
        """The rate, if it is a variable; `None` if a schedule or a function gives it."""
        rate = getattr(self._optimizer, "_learning_rate", None)
        return float(rate.numpy()) if isinstance(rate, keras.Variable) else None

    @property
    def accumulation_steps(self) -> int:
        """How many micro-steps make an update."""
        return int(self._optimizer.gradient_accumulation_steps or 1)

    @property
    def micro_steps(self) -> int:
        """How many micro-steps were made."""
        return int(self._optimizer._iterations.numpy())

    @property
    def counter(self) -> Any:
        """The variable that counts micro-steps."""
        return self._optimizer._iterations

    @property
    def accumulators(self) -> list[Any]:
        """The sums of a replica's gradients, one a trainable variable; they differ between replicas."""
        return list(getattr(self._optimizer, "_accumulated_gradients", ()))

    @property
    def variables(self) -> list[Any]:
        """All other variables: counters, rate, averages, slots, the loss scale; equal on all replicas."""
        own = {id(variable) for variable in self.accumulators}
        return [variable for variable in self._optimizer._variables if id(variable) not in own]
