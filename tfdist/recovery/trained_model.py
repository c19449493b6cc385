"""What is trained: the variables, optimizers and metrics of the model that `fit` trains."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tfdist.keras_internals.accumulation import Accumulation
from tfdist.keras_internals.model_state import ModelVariable, model_variables, optimizers_of, updating_optimizers
from tfdist.keras_internals.scheduled_training import training_of
from tfdist.keras_internals.symbolic_build import build_for_training
from tfdist.training.metric_synchronization import exchanged_metrics
from tfdist.training.strategy_protocol import training_strategy


class Trained(Protocol):
    """A model, or the objects of a custom loop.

    Attributes:
        strategy: The strategy under which their variables were created.
    """

    strategy: Any

    def variables(self) -> dict[str, ModelVariable]:
        """Returns the variables besides those of optimizers and metrics, each once, by a name that stays."""
        ...

    def optimizers(self) -> list[Any]:
        """Returns all optimizers, including those that other optimizers wrap, each once."""
        ...

    def metrics(self) -> dict[str, Any]:
        """Returns the variables of the metrics, each once, by a name that stays."""
        ...

    def exchanged_metrics(self) -> list[Any]:
        """Returns those whose sums over all replicas each step exchanges."""
        ...

    def updated_variables(self) -> list[Any]:
        """Returns the variables whose gradients are exchanged, in the order in which compression names them."""
        ...

    def accumulation(self) -> Accumulation | None:
        """Returns the accumulation of the optimizer of a model."""
        ...

    def build(self, element_spec: Any) -> None:
        """Creates the variables that the first step would create; `element_spec` is that of the dataset, if known."""
        ...

    def creates_later(self, name: str) -> bool:
        """Whether a variable of a metric will be created in the first step, and not by `build`."""
        ...

    def on_creation(self, function: Callable[[], None]) -> None:
        """Calls `function` when such variables exist, before they are used."""
        ...

    def wait(self) -> None:
        """Waits for the steps that other processes still compute."""
        ...


class TrainedModel:
    """A compiled Keras model.

    >>> import keras
    >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
    >>> model.compile("sgd", "mse")
    >>> list(TrainedModel(model).variables()), len(TrainedModel(model).optimizers())
    (['weights/2.Dense/0'], 1)
    """

    def __init__(self, model: Any) -> None:
        self._model, self.strategy = model, model.distribute_strategy

    def variables(self) -> dict[str, ModelVariable]:
        """See `Trained`."""
        return {f"{variable.kind}/{variable.key}": variable for variable in model_variables(self._model)}

    def optimizers(self) -> list[Any]:
        """See `Trained`."""
        return list(optimizers_of(self._model))

    def metrics(self) -> dict[str, Any]:
        """See `Trained`; including the trackers of the losses."""
        return variables_of_metrics(self._model.metrics)

    def exchanged_metrics(self) -> list[Any]:
        """See `Trained`."""
        return exchanged_metrics(self._model)

    def updated_variables(self) -> list[Any]:
        """See `Trained`."""
        return [] if self._model.optimizer is None else list(self._model.trainable_variables)

    def accumulation(self) -> Accumulation | None:
        """See `Trained`."""
        return None if self._model.optimizer is None else Accumulation(self._model)

    def build(self, element_spec: Any) -> None:
        """See `Trained`. The spec is not needed if model, losses and metrics are built.

        Raises:
            RuntimeError: If variables are missing and the shapes of a batch are not known.
        """
        build_for_training(self._model, element_spec)
        if (updates := training_strategy(self.strategy).local_updates) is not None:
            updates.prepare(self._model, updating_optimizers(self._model))  # as the first update would

    def creates_later(self, name: str) -> bool:
        """See `Trained`."""
        del name
        return False

    def on_creation(self, function: Callable[[], None]) -> None:
        """See `Trained`."""
        del function

    def wait(self) -> None:
        """See `Trained`; of parameter servers."""
        if (training := training_of(self._model)) is not None:
            training.wait()


def variables_of_metrics(metrics: Sequence[Any], first: int = 0) -> dict[str, Any]:
    """Returns the variables of metrics, each once, by the position of the metric, from `first` on, and its class."""
    variables: dict[str, Any] = {}
    seen: set[int] = set()
    for position, metric in enumerate(metrics, first):
        for index, variable in enumerate(metric.variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                variables[f"{position}.{type(metric).__name__}/{index}"] = variable
    return variables
