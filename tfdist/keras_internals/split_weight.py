"""A Keras weight of which each replica holds a part, and the calls of layers that compute with whole values."""

import contextvars
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import SHAPE_GRAPH, TFOptimizer, stateless_scope
from tfdist.keras_internals.placed_variables import NewValue
from tfdist.keras_internals.split_slot import Gather, SplitSlot, is_updating_parts
from tfdist.patches import patch, replace
from tfdist.tensorflow_internals.function_graphs import graphs_around, is_of_trace
from tfdist.tensorflow_internals.tensorflow_symbols import may_be_recorded
from tfdist.utils.temporary_values import setting

# The weights that a running call of a layer has gathered, by their ids, with their values: none after an assignment.
_gathered: contextvars.ContextVar[Mapping[int, tuple["SplitWeight", list[tf.Tensor]]]] = contextvars.ContextVar(
    "tfdist_gathered", default=MappingProxyType({})
)
_is_rematerialized = contextvars.ContextVar("tfdist_rematerialized", default=False)


class Gathers(Protocol):
    """Gathers split weights on the replica that is being traced."""

    def call_layer(self, layer: Any, weights: Sequence["SplitWeight"], call: Callable[..., Any], inputs: Any) -> Any:
        """Calls `call(*args, **kwargs)` of a layer, where `inputs` are `(args, kwargs)`, with the layer's weights."""

    def read(self, weight: "SplitWeight") -> tf.Tensor:
        """Returns the whole value of one weight; its gradient is the part that this replica holds."""

    def local_replica(self) -> int:
        """Returns the number of the replica that is being traced, among those of this process."""


class SplitWeight(SplitSlot, keras.Variable):
    """A weight whose flattened values are split over the replicas of all workers, as those of a `SplitSlot`.

    Its `value` is a tensor: within a call of its layer what this call has gathered, elsewhere in a step what is
    gathered for this read, and outside of functions what all workers gather together.
    """

    _gathers: Gathers
    _kind = "weight"
    _remedy = (
        "Functions of `fit`, `evaluate`, `predict` and `strategy.run` gather weights. To export or serve a model, save "
        "it, and load it without a strategy."
    )

    def hold_parts(
        self,
        gathers: Gathers,
        value: tf.Tensor,
        bounds: Sequence[tuple[int, int]],
        devices: Sequence[str],
        first: int,
        gather: Gather,
    ) -> None:
        """Creates the parts of a whole `value`; for the others see `SplitSlot`."""
        self._gathers, self._is_whole = gathers, False
        self._bounds, self._devices, self._first, self._gather = list(bounds), list(devices), first, gather
        self._create_parts(value)

    @property
    def value(self) -> Any:
        """The part of the replica that is being updated; elsewhere the whole value, a tensor."""
        return super().value if is_updating_parts() else self._maybe_autocast(self._whole_value())

    def _whole_value(self) -> tf.Tensor:
        if self.is_gathered:
            value = _gathered.get()[id(self)][1][0]
            if value.dtype in (self._dtype, self.dtype):  # else gathered in the dtype of a layer that asks for another
                return value
        if is_tracing_shapes():
            return tf.zeros(self._shape, self._dtype)
        if tf.executing_eagerly() and may_be_recorded():
            raise RuntimeError(
                "The gradients of weights in parts are computed by compiled steps. Received: a gradient tape that runs "
                f"eagerly, as with `run_eagerly=True`, and reads {self.path!r}. Expected: `run_eagerly=False`, and "
                "steps of custom loops within `strategy.run` in a `tf.function`. Compile the step, or create the "
                "strategy with `shard_optimizer_state=True` in place of `shard_weights=True`."
            )
        if tf.executing_eagerly() or not _is_in_replica():
            return self.read_value()
        return self._gathers.read(self)

    @property
    def is_gathered(self) -> bool:
        """Whether a running call of a layer has gathered its present value, for the function that is being traced."""
        _, values = _gathered.get().get(id(self), (self, []))
        return bool(values) and is_of_trace(values[0])

    @property
    def part(self) -> tf.Variable:
        """The part of the replica that is being traced."""
        return self._parts[self._gathers.local_replica()]

    @property
    def gradient_shape(self) -> tf.TensorShape:
        """The shape of the gradient, of the part of this replica."""
        return self.part.shape

    @property
    def handle(self) -> Any:
        return self.part.handle

    def assign(self, value: Any) -> Any:
        """Assigns a whole value, equal on all replicas; within `parts_of_replica` the part."""
        if is_updating_parts() or tf.executing_eagerly() or tf.distribute.in_cross_replica_context():
            return super().assign(value)
        value = self._convert_to_tensor(value, dtype=self._dtype)
        start, stop = self._own_bounds[self._gathers.local_replica()]
        self.part.assign(self._part(tf.reshape(tf.ensure_shape(value, self._shape), [-1]), start, stop))
        if id(self) in _gathered.get():
            _gathered.get()[id(self)][1].clear()
        return value


def split_weight(new: NewValue, *held: Any) -> tf.Variable:
    """Makes the Keras variable that is being created a `SplitWeight`; returns one of its parts.

    `held` are the arguments of `SplitWeight.hold_parts`.
    """
    weight: Any = new.variable
    weight.__class__ = SplitWeight
    weight.hold_parts(*held)
    return weight._value


def held_on_replica(variable: keras.Variable) -> Any:
    """Returns the `tf.Variable` that this replica has of a weight: its copy, or its part."""
    return variable.part if isinstance(variable, SplitWeight) else variable._value


def is_tracing_shapes() -> bool:
    """Whether Keras calls a layer only to know the shapes of its outputs."""
    if tf.executing_eagerly() or stateless_scope() is None:
        return False
    graphs = graphs_around(tf.compat.v1.get_default_graph())
    return any(str(getattr(graph, "name", "")).startswith(SHAPE_GRAPH) for graph in graphs)


def with_gathered(weights: Sequence[SplitWeight], values: Sequence[tf.Tensor]) -> AbstractContextManager[None]:
    """Within this context the weights have whole values."""
    new = {id(weight): (weight, [value]) for weight, value in zip(weights, values, strict=True)}
    return setting(_gathered, {**_gathered.get(), **new})


def gathered_weights() -> tuple[list[SplitWeight], list[tf.Tensor]]:
    """Returns the weights that the running calls of layers have gathered, and their values."""
    pairs = [(weight, values[0]) for weight, values in _gathered.get().values() if values]
    return [weight for weight, _ in pairs], [value for _, value in pairs]


def is_rematerialized() -> bool:
    """Whether a layer is called that backpropagation will call again (`keras.RematScope`)."""
    return _is_rematerialized.get()


def computed_dtypes(layer: Any | None, weights: Sequence[SplitWeight]) -> list[tf.DType]:
    """Returns the dtype in which a layer, or a layer within it, computes with each of its weights.

    Where it casts them anyway, they are cast before they are gathered.
    """
    dtypes: dict[int, set[Any]] = {}
    for inner in [] if layer is None else layer._flatten_layers():
        for variable in inner._trainable_variables:
            casts = inner.autocast and variable._autocast
            dtypes.setdefault(id(variable), set()).add(inner.compute_dtype if casts else variable._dtype)
    chosen = [dtypes.get(id(weight), set()) for weight in weights]
    return [
        tf.as_dtype(next(iter(of_weight)) if len(of_weight) == 1 else weight._dtype)
        for of_weight, weight in zip(chosen, weights, strict=True)
    ]


def call_with_whole_weights(layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls `call(*args, **kwargs)` of a layer, which gathers its split weights if it is in no other layer."""
    weights = _weights_to_gather(layer)
    if not weights:
        return call(*args, **kwargs)
    if layer._remat_mode is not None:  # layers within it gather, each time that it is called
        with setting(_is_rematerialized, True):
            return call(*args, **kwargs)
    return weights[0]._gathers.call_layer(layer, weights, call, (args, kwargs))


@patch
def patch_split_weights() -> None:
    """Makes penalties of weights in parts gather one after another, and optimizers know such weights."""
    var_key, get_losses = TFOptimizer._var_key, keras.Layer._get_regularization_losses

    @replace(keras.Layer, "_get_regularization_losses")
    def get_losses_of_gathered(self: Any) -> list[Any]:
        if not _gathers_now():
            return get_losses(self)
        regularized = [weight for weight in self.trainable_weights if weight.regularizer is not None]
        return [
            weight._gathers.call_layer(None, [weight], weight.regularizer, ((weight,), {}))
            if isinstance(weight, SplitWeight)
            else weight.regularizer(weight)
            for weight in regularized
        ]

    @replace(TFOptimizer, "_var_key")
    def key_of_part(self: Any, variable: Any) -> Any:
        return var_key(self, variable._value if isinstance(variable, SplitWeight) else variable)


def _weights_to_gather(layer: Any) -> list[SplitWeight]:
    is_unit = not isinstance(layer, keras.Model) and layer.built and _gathers_now()
    return missing_weights(layer) if is_unit else []


def missing_weights(layer: Any) -> list[SplitWeight]:
    """Returns the split weights of a layer that no running call has gathered."""
    return [weight for weight in layer.variables if isinstance(weight, SplitWeight) and not weight.is_gathered]


def _is_in_replica() -> bool:
    """Whether a replica of a strategy is being traced. A function without a strategy would wait for other replicas."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _gathers_now() -> bool:
    """Whether a step of a replica is being traced."""
    in_step = not tf.executing_eagerly() and _is_in_replica()
    return in_step and not is_tracing_shapes() and stateless_scope() is None
