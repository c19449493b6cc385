"""What a Keras model consists of, under keys that the same program finds again in another process.

Keras numbers the names of layers by what a process has made before, so that they differ between two processes. The keys
here tell a layer's place in the model and its class: `3.Dense/0` is the first variable of the fourth layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.declared_batch import declared_batch
from tfdist.private_symbols import private

private("keras.src.trainers.trainer:Trainer._symbolic_build", "builds model, metrics and optimizer without a batch")
private("keras.src.models:Model._flatten_layers", "finds the layers with batch statistics")

WEIGHT, STATE, SEED = "weights", "state", "seeds"
_MOST_ITEMS = 1000  # of a list or dictionary that is looked through: larger ones hold data


@dataclass(frozen=True)
class ModelVariable:
    """A variable of a model.

    Attributes:
      kind: `WEIGHT` for what was made to be trained (also while it is frozen), `SEED` for the state of a seed
        generator, `STATE` for the rest, such as moving statistics.
      key: its place in the model.
      variable: a `keras.Variable`.
    """

    kind: str
    key: str
    variable: Any


def model_variables(model: Any) -> list[ModelVariable]:
    """All variables of `model` but those of its metrics, each once."""
    found: list[ModelVariable] = []
    seen: set[int] = set()
    listed = {id(part) for variable in model.variables for part in (variable, variable.value)}
    for position, layer in enumerate(model._flatten_layers()):
        for kind, variables in (
            (WEIGHT, layer._trainable_variables),
            (STATE, layer._non_trainable_variables),
            (SEED, [generator.state for generator in layer._seed_generators]),
        ):
            for index, variable in enumerate(variables):
                if id(variable) not in seen:
                    seen.add(id(variable))
                    found.append(ModelVariable(kind, f"{position}.{type(layer).__name__}/{index}", variable))
        # Keras does not list states of stateful RNNs, nor a layer's own `tf.Variable`s.
        own = [value for value in _within(layer) if isinstance(value, keras.Variable | tf.Variable)]
        for index, variable in enumerate(value for value in own if id(value) not in listed):
            if id(variable) not in seen:
                seen.add(id(variable))
                found.append(ModelVariable(STATE, f"{position}.{type(layer).__name__}/own/{index}", variable))
    others = [variable for variable in model.variables if id(variable) not in seen]
    return found + [ModelVariable(STATE, f"model/{index}", variable) for index, variable in enumerate(others)]


def metric_variables_by_key(model: Any) -> dict[str, Any]:
    """The variables of the metrics of `model`, the trackers of its losses included, each once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for position, metric in enumerate(model.metrics):
        for index, variable in enumerate(metric.variables):
            if id(variable) not in seen:
                seen.add(id(variable))
                found[f"{position}.{type(metric).__name__}/{index}"] = variable
    return found


def build_for_training(model: Any, element_spec: Any = None) -> None:
    """Makes the variables of the model, its metrics and its optimizer that are still missing, as Keras would.

    Without a strategy Keras makes them only while it traces the first step.

    Args:
      model: a compiled Keras model.
      element_spec: the structure of `tf.TypeSpec`s of its batches, `(inputs, targets)` or with sample weights: the
        `element_spec` of a `tf.data.Dataset` or of a distributed one.

    Raises:
      RuntimeError: the model, its losses or its metrics have not been built, and the shapes of a batch are not known.
    """
    parts = [model._compile_metrics, model._compile_loss]
    needs_shapes = not all(layer.built for layer in model._flatten_layers()) or not all(
        part is None or part.built for part in parts
    )
    batch = None
    if needs_shapes:
        try:
            if element_spec is None:
                raise ValueError("no batch was described")
            batch = declared_batch(element_spec)
        except (AttributeError, TypeError, ValueError) as error:
            raise RuntimeError(
                "The variables of the model or its metrics cannot be made before the first batch. Received: batches "
                f"of {element_spec}. Expected: tensors of known rank. Build the model by calling it on a batch, and "
                "train from data whose shapes are known (`tf.ensure_shape` in a `map`)."
            ) from error
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=batch)


def components(strategy: Any, variable: Any) -> list[Any]:
    """The `tf.Variable`s of this worker that a variable consists of: one a local replica, if it is distributed."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(value, tf.distribute.DistributedValues):
        return list(strategy.experimental_local_results(value))
    return [value]


def path_of(variable: Any) -> str:
    """What people know a variable by."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])


def optimizers_of(model: Any) -> Iterator[Any]:
    """The optimizer of `model`, those that it consists of, and others in attributes of the model, each once."""
    seen: set[int] = set()

    def each(optimizer: Any) -> Iterator[Any]:
        if optimizer is None or id(optimizer) in seen:
            return
        seen.add(id(optimizer))
        yield optimizer
        for inner in (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())):
            yield from each(inner)

    yield from each(model.optimizer)
    for value in _within(model):
        if isinstance(value, keras.optimizers.Optimizer):
            yield from each(value)


def _within(owner: Any) -> list[Any]:
    """What the attributes of a layer or model hold, also in lists, tuples and dictionaries."""
    found: list[Any] = []
    # Those of TensorFlow's own bookkeeping hold the same once more.
    waiting = [value for name, value in vars(owner).items() if not name.startswith("_self_")]
    waiting.reverse()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, Mapping | list | tuple):
            found.append(value)
        elif len(value) <= _MOST_ITEMS:
            waiting.extend(reversed(list(value.values()) if isinstance(value, Mapping) else value))
    return found
