"""Keras optimizers whose slots are split over the replicas: which ones can be, and how their slots are created."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import LossScaleOptimizer, TFOptimizer
from tfdist.keras_internals.keras_updates import is_of_each_value
from tfdist.keras_internals.optimizer_overrides import overridden_update
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.sharded_averages import patch_sharded_averages
from tfdist.keras_internals.sharded_variables import Gather, ShardedVariable
from tfdist.private_symbols import private

for _path, _why in {
    "keras.src.backend.tensorflow.optimizer:TFOptimizer.build": "does not tell which variables slots will be for",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer.add_variable_from_reference": "creates whole slots",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._track_variable": "lists the variables of an optimizer",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._var_key": "finds the slots of a variable",
    "keras.src.backend.tensorflow.optimizer:TFOptimizer._use_weight_decay": "whether a variable decays",
}.items():
    private(_path, _why)

_OWN_METHODS = (
    "_overwrite_model_variables_with_average_value _update_model_variables_moving_average add_variable_from_reference"
).split()
_WHOLE = "gradient_accumulator"  # each replica sums its gradients there


class _Span(Protocol):
    start: int
    stop: int


class _Layout(Protocol):
    def spans(self, position: int) -> Sequence[_Span]: ...


class _Sharding(Protocol):
    devices: Sequence[str]
    first: int
    gather: Gather

    def plan(self, specs: Sequence[tf.TensorSpec]) -> _Layout: ...


class SplitSlots:
    """The layout of one optimizer's slots."""

    def __init__(self, optimizer: Any, variables: Sequence[Any], sharding: Any) -> None:
        self.sharding = sharding
        self._positions = {optimizer._var_key(variable): number for number, variable in enumerate(variables)}
        self.layout = sharding.plan([_spec(optimizer, variable) for variable in variables])
        self.is_used = False

    def new_slot(self, optimizer: Any, variable: Any, name: str, initializer: Any) -> ShardedVariable | None:
        """Returns a slot for `variable`; `None` if the optimizer was not built for it."""
        position = self._positions.get(optimizer._var_key(variable))
        if position is None:
            return None
        sharding: _Sharding = self.sharding
        self.is_used = True
        return ShardedVariable(
            [(span.start, span.stop) for span in self.layout.spans(position)],
            sharding.devices,
            sharding.first,
            sharding.gather,
            initializer=keras.initializers.get(initializer),
            shape=variable.shape,
            dtype=variable.dtype,
            trainable=False,
            name=name,
        )


_split: weakref.WeakKeyDictionary[Any, SplitSlots] = weakref.WeakKeyDictionary()


def split_slots(optimizer: Any) -> SplitSlots | None:
    """Returns the layout of the slots of an optimizer; `None` if they are whole, or if it has none."""
    found = _split.get(optimizer)
    return found if found is not None and found.is_used else None


def split_slots_of(update: OptimizerUpdate) -> SplitSlots | None:
    """Returns `split_slots` for the optimizer of an update."""
    return split_slots(update._optimizer)


def patch_sharded_optimizers(sharding_of: Callable[[Any], Any]) -> None:
    """Makes optimizers create split slots.

    Args:
        sharding_of: Takes the strategy of an optimizer; returns what plans and gathers, or `None` for whole slots.
    """
    build, add = TFOptimizer.build, TFOptimizer.add_variable_from_reference

    @functools.wraps(build)
    def build_with_layout(self: Any, variables: Any) -> Any:
        sharding = None if isinstance(self, LossScaleOptimizer) else sharding_of(self._distribution_strategy)
        if sharding is not None:
            _check_can_be_split(self)
            _split[self] = SplitSlots(self, variables, sharding)
        return build(self, variables)

    @functools.wraps(add)
    def add_split(self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
        slots = _split.get(self)
        if slots is None or name == _WHOLE:
            return add(self, reference_variable, name=name, initializer=initializer)
        path = getattr(reference_variable, "path", None) or reference_variable.name.replace(":", "_")
        with keras.name_scope(self.name, caller=self):
            slot = slots.new_slot(self, reference_variable, f"{path.replace('/', '_')}_{name or 'var'}", initializer)
        if slot is None:
            return add(self, reference_variable, name=name, initializer=initializer)
        self._track_variable(slot)
        return slot

    TFOptimizer.build = build_with_layout
    TFOptimizer.add_variable_from_reference = add_split
    patch_sharded_averages(lambda optimizer: split_slots(optimizer) is not None)
    _patched_methods.update({name: getattr(TFOptimizer, name) for name in _OWN_METHODS})


_patched_methods: dict[str, Any] = {}


def _check_can_be_split(optimizer: Any) -> None:
    kind = type(optimizer)
    own = overridden_update(optimizer) or next(
        (name for name, stock in _patched_methods.items() if getattr(kind, name) is not stock), None
    )
    is_keras = kind.__module__.startswith("keras.")
    if own is None and is_of_each_value(optimizer):
        return
    reason = (
        "whose update of a value uses other values of the variable, or state beside the slots"
        if is_keras
        else f"whose class defines its own {own or 'update'}, so that tfdist cannot know whether a part of a variable "
        "can be updated alone"
    )
    raise ValueError(
        "`shard_optimizer_state=True` needs an optimizer that updates each value of a variable by itself. Received: "
        f"{kind.__name__}, {reason}. Expected: Adadelta, Adagrad, Adam, Adamax, AdamW, Ftrl, Lion, RMSprop or SGD. "
        "Choose one of these, or create the strategy without `shard_optimizer_state`."
    )


def _spec(optimizer: Any, variable: Any) -> tf.TensorSpec:
    # What is overwritten by its gradient (float8's scales) has no slots and no update.
    is_value = optimizer._overwrite_variable_with_gradient(variable)
    return tf.TensorSpec([0] if is_value else variable.shape, variable.dtype)
