"""Layers that contain layers, as a block of a transformer: inner layers, and code that combines their results.

The code of such a layer is not known. So what its inner layers return is whole, except where a trace shows that nothing
but layers that take parts uses it: the hidden values between a Dense that is split by columns and one split by rows.
"""

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.layer_calls import (
    LayerCall,
    initial_scope,
    is_rematerialized,
    kernel_of,
    layers_inside,
    output_projection_of,
    replaced_calls,
)
from tfdist.tensor_parallel.sharded_layers import (
    ELEMENTWISE,
    aware_layers,
    drops_parts,
    is_attention,
    is_dense,
    is_elementwise,
    is_elementwise_function,
    split_dropouts,
)


@dataclass(frozen=True)
class InnerCall:
    """A call of a layer inside of another layer.

    Attributes:
        layer: The inner layer.
        input: The tensor that it takes; None if there is none, or several.
        outputs: The tensors that it returns.
        first: The number of the first operation that it creates.
        end: The number after its last one.
    """

    layer: Any
    input: Any
    outputs: Sequence[Any]
    first: int
    end: int


@dataclass
class InnerCalls:
    """All calls inside of one call of a layer, in the order in which they end.

    Attributes:
        calls: The calls.
        values: The value of each variable in the trace, by the id of the variable.
        function: The trace that they belong to.
    """

    calls: list[InnerCall] = field(default_factory=list)
    values: dict[int, Any] = field(default_factory=dict)
    function: Any = None

    def only_call_of(self, layer: Any) -> InnerCall | None:
        """Returns the call of a layer that is called once, else None."""
        calls = [call for call in self.calls if call.layer is layer]
        return calls[0] if len(calls) == 1 else None

    def owns_its_variables(self, layer: Any) -> bool:
        """Whether nothing outside of the calls of an inner layer uses its variables."""
        numbers = {operation.name: number for number, operation in enumerate(self.operations)}
        call_ranges = [range(call.first, call.end) for call in self.calls if call.layer is layer]
        values = [self.values[id(variable)] for variable in layer.variables if id(variable) in self.values]
        users = [user for value in values for user in value.consumers()]
        return all(any(numbers[user.name] in call_range for call_range in call_ranges) for user in users)

    @property
    def operations(self) -> list[Any]:
        """The operations of the trace, in the order in which they were created."""
        return list(self.function.graph.get_operations())

    @property
    def returned(self) -> list[Any]:
        """The tensors that the layer returns, and its losses. The trace returns copies of them."""
        return [operation.inputs[0] for operation in self.operations if operation.name.startswith("returned")]


def inner_calls(call: LayerCall, *, training: bool, of_any_width: Sequence[Any] = ()) -> InnerCalls | None:
    """Traces a call of a layer on complete values, apart from everything else.

    Layers `of_any_width` have results with a last axis of unknown size, so that nothing can depend on it. Returns None
    if the layer has no inner layers, calls them within a condition or a loop, or cannot be traced alone.
    """
    layers = layers_inside(call.operation) if isinstance(call.operation, keras.layers.Layer) else []
    if not layers or any(map(is_rematerialized, (call.operation, *layers))):
        return None
    traced_calls = InnerCalls()
    tensors, variables = list(call.inputs), call.variables
    specs = [tf.TensorSpec(argument.shape, argument.dtype) for argument in (*tensors, *variables)]

    def traced(*function_inputs: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        values = {id(symbolic): tensor for symbolic, tensor in zip(tensors, function_inputs, strict=False)}
        variable_values = function_inputs[len(tensors) :]
        traced_calls.values = dict(zip(map(id, variables), variable_values, strict=True))
        recorded = {layer: _recorded(layer, traced_calls, graph, of_any_width) for layer in layers}
        with initial_scope(variables, variable_values) as scope, replaced_calls(recorded):
            results = [*call(values, training=training), *scope.losses]
        return [tf.identity(tf.convert_to_tensor(result), name="returned") for result in results]

    def trace() -> Any:
        with tf.init_scope(), tf.device(None):
            return tf.function(traced, autograph=False).get_concrete_function(*specs)

    try:
        traced_calls.function = contextvars.Context().run(trace)  # without the losses of a step
    except Exception:  # Whatever a layer raises, it can be computed as a whole.
        return None
    return None if any(inner.first < 0 for inner in traced_calls.calls) else traced_calls


def _recorded(layer: Any, traced_calls: InnerCalls, graph: Any, of_any_width: Sequence[Any]) -> Callable[..., Any]:
    call = type(layer).call.__get__(layer)
    is_any_width = any(layer is wide_layer for wide_layer in of_any_width)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        is_inside = tf.compat.v1.get_default_graph() is graph
        first = len(graph.get_operations()) if is_inside else -1
        result = call(*args, **kwargs)
        if is_any_width:
            result = tf.raw_ops.PlaceholderWithDefault(input=result, shape=[*result.shape[:-1], None])
        leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if tf.is_tensor(leaf)]
        outputs = [leaf for leaf in keras.tree.flatten(result) if tf.is_tensor(leaf)]
        layer_input = leaves[0] if len(leaves) == 1 else None
        traced_calls.calls.append(InnerCall(layer, layer_input, outputs, first, len(graph.get_operations())))
        return result

    return recorded


@dataclass(frozen=True)
class AwareLayers:
    """The layers of a layer call that compute on parts of variables.

    Attributes:
        layers: The layers themselves.
        whole: Those that must return whole values, by id.
        dropouts: Dropout layers whose inputs are split, each with the axis, and its whole size if it may be padded.
    """

    layers: list[Any] = field(default_factory=list)
    whole: frozenset[int] = frozenset()
    dropouts: list[tuple[Any, int, int | None]] = field(default_factory=list)

    @property
    def variables(self) -> set[int]:
        """The ids of their variables, without those of an activation that is a layer."""
        inside = [nested for layer in self.layers for nested in layers_inside(layer)]
        of_inside = {id(variable) for layer in inside for variable in layer.variables}
        return {id(variable) for layer in self.layers for variable in layer.variables} - of_inside


def aware_layers_of(call: LayerCall, axes: Mapping[int, int], *, training: bool) -> AwareLayers:
    """Returns the layers of a layer call that compute on parts of variables, also those inside of its layer.

    `axes` has by the id of a split variable its axis.
    """
    own = list(aware_layers(call.operation, axes))
    if own or not any(id(variable) in axes for variable in call.variables):
        return AwareLayers(own, dropouts=split_dropouts(call.operation) if own else [])
    if any(map(is_rematerialized, [call.operation, *layers_inside(call.operation)])):
        return AwareLayers()  # what is computed again exchanges nothing
    inner = inner_calls(call, training=training)
    if inner is None:
        return AwareLayers()
    layers, outermost = [], inner_layers_of(inner)
    of_attention: list[tuple[Any, int, int | None]] = []
    for layer in outermost:
        is_known = type(layer) is not keras.layers.EinsumDense or is_dense(layer)
        if is_known and _returns_whole_values(inner, layer, axes):
            found = [aware for aware in aware_layers(layer, axes) if is_attention(layer) or aware is layer]
            layers += found
            of_attention += split_dropouts(layer) if found else []
    own_dense = [layer for layer in outermost if is_dense(layer) and any(layer is known for known in layers)]
    kept, dropouts = _kept(inner, own_dense, axes)
    if kept and kept != _kept(inner_calls(call, training=training, of_any_width=kept), own_dense, axes)[0]:
        kept, dropouts = [], []  # something depends on the width of their results
    whole = frozenset(id(layer) for layer in outermost if not any(layer is kept_layer for kept_layer in kept))
    return AwareLayers(layers, whole, [*of_attention, *dropouts])


def _kept(inner: InnerCalls | None, layers: list[Any], axes: Mapping[int, int]) -> tuple[list[Any], list[Any]]:
    """Returns the Dense layers whose results stay split, and as in `AwareLayers` the Dropout layers that take them."""
    kept: list[Any] = []
    dropouts: list[tuple[Any, int, int | None]] = []
    known = {id(layer) for layer in layers}
    for layer in layers:
        hidden = None if inner is None else hidden_values_of(inner, layer)
        if hidden is None or not {id(dense) for dense in (*hidden.columns, *hidden.rows)} <= known:
            continue
        are_columns = all(axes.get(id(kernel_of(dense))) == 1 for dense in hidden.columns)
        if are_columns and all(axes.get(id(kernel_of(dense))) == 0 for dense in hidden.rows):
            kept.append(layer)
            dropouts += [(passed, -1, kernel_of(layer).shape[1]) for passed in hidden.between if drops_parts(passed)]
    return kept, dropouts


def _returns_whole_values(inner: InnerCalls, layer: Any, axes: Mapping[int, int]) -> bool:
    """Whether attention returns no scores, which are split by heads, and its last layer is not split by columns."""
    if not is_attention(layer):
        return True
    kernel = kernel_of(output_projection_of(layer))
    has_scores = any(len(call.outputs) != 1 for call in inner.calls if call.layer is layer)
    return not has_scores and axes.get(id(kernel), 0) < 2


def hidden_values_of(inner: InnerCalls, layer: Any) -> "HiddenValues | None":
    """Returns the hidden values that an inner Dense layer returns, alone or combined with those of others.

    Returns None if anything else uses them, if one of these layers is called several times, or if they have other
    widths.
    """
    found = combined_results(inner, layer)
    if found is None:
        return None
    is_known = all(is_dense(dense) and inner.only_call_of(dense) for dense in (*found.columns, *found.rows))
    if not is_known or len({kernel_of(dense).shape[1] for dense in found.columns}) > 1:
        return None
    activations, softmax = [dense.activation for dense in found.columns], keras.activations.softmax
    stays_split = all(activation is softmax or is_elementwise_function(activation) for activation in activations)
    return found if stays_split else None


def _passes(layer: Any) -> bool:
    return is_elementwise(layer) or drops_parts(layer)


def inner_layers_of(inner: InnerCalls) -> list[Any]:
    """Returns the layers that a layout may split: not those inside of attention, or whose variables other code uses."""
    layers = {id(call.layer): call.layer for call in inner.calls}
    inside = {id(nested) for layer in layers.values() if is_attention(layer) for nested in layers_inside(layer)}
    return [layer for key, layer in layers.items() if key not in inside and inner.owns_its_variables(layer)]


def combined_results(inner: InnerCalls, layer: Any) -> "HiddenValues | None":
    """Follows what an inner layer returns through layers and code that compute element by element.

    Returns None if anything else than layers and such code uses it, or nothing; or if a layer is called several times.
    """
    found = HiddenValues(inner)
    return found if found.add_source(layer) and found.follow() else None


class HiddenValues:
    """What inner layers return and code combines element by element, as in a gated block, until other layers take it.

    Attributes:
        columns: The layers that return it: Dense layers that are split by columns.
        rows: The layers that take the combined values: Dense layers that are split by rows.
        between: The layers between, which compute element by element.
    """

    def __init__(self, inner: InnerCalls) -> None:
        self._inner = inner
        self._numbers = {operation.name: number for number, operation in enumerate(inner.operations)}
        self._returned = {tensor.ref() for tensor in inner.returned}
        self.columns: list[Any] = []
        self.rows: list[Any] = []
        self.between: list[Any] = []
        self._known: set[Any] = set()
        self._waiting: list[Any] = []
        self._operands: list[Any] = []

    def add_source(self, layer: Any) -> bool:
        """Adds the result of a layer; False if the layer is called several times, or returns several tensors."""
        own = self._inner.only_call_of(layer)
        if own is None or len(own.outputs) != 1:
            return False
        if _append(self.columns, layer):
            self._waiting.append(own.outputs[0])
        return True

    def follow(self) -> bool:
        """Follows all results until nothing new is found; False if something else uses them."""
        while self._waiting or self._operands:
            if self._waiting:
                tensor = self._waiting.pop()
                if tensor.ref() not in self._known:
                    self._known.add(tensor.ref())
                    if not self._follow(tensor):
                        return False
            else:
                operand = self._operands.pop()
                if operand.ref() not in self._known and not self._trace_back(operand):
                    return False
        return bool(self.rows)

    def _follow(self, tensor: Any) -> bool:
        if tensor.ref() in self._returned:
            return False
        for operation in tensor.consumers():
            number = self._numbers[operation.name]
            takers = [call for call in self._inner.calls if call.input is tensor and call.first <= number < call.end]
            if takers:
                self._take(min(takers, key=lambda one: one.end - one.first))
            elif operation.type == "IdentityN":  # as that of a custom gradient, which passes its arguments, too
                outputs = zip(operation.inputs, operation.outputs, strict=True)
                self._waiting += [out for one, out in outputs if one is tensor]
            elif operation.type in ELEMENTWISE:
                self._waiting += operation.outputs
                self._operands += [operand for operand in operation.inputs if not _is_constant_scalar(operand)]
            else:
                return False
        return True

    def _take(self, call: InnerCall) -> None:
        if _passes(call.layer):
            _append(self.between, call.layer)
            self._waiting += call.outputs
        else:
            _append(self.rows, call.layer)

    def _trace_back(self, tensor: Any) -> bool:
        """Adds the layers from whose results a tensor was computed; False if it was not computed from such alone."""
        maker = next((call for call in self._inner.calls if any(tensor is out for out in call.outputs)), None)
        if maker is not None and not _passes(maker.layer):
            return self.add_source(maker.layer)
        operation = tensor.op
        if maker is not None and maker.input is not None:
            self._operands.append(maker.input)
        elif operation.type == "IdentityN":
            self._operands.append(operation.inputs[operation.outputs.index(tensor)])
        elif operation.type in ELEMENTWISE:
            self._operands += [operand for operand in operation.inputs if not _is_constant_scalar(operand)]
        else:
            return False
        return True


def _append(layers: list[Any], layer: Any) -> bool:
    """Adds a layer, and returns True, unless it is among them."""
    is_new = not any(layer is known for known in layers)
    layers += [layer] if is_new else []
    return is_new


def _is_constant_scalar(tensor: Any) -> bool:
    """Whether a tensor is a number of the program, possibly cast."""
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor.op.type == "Const" and tensor.shape.rank == 0
