"""`jit_compile` under a strategy: which models XLA compiles, and which calls of layers and losses in a step."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import (
    LossFunctionWrapper,
    TensorFlowTrainer,
    get_mask,
    is_in_layer_call,
    set_mask,
    stateless_scope,
    supports_jit,
)
from tfdist.keras_internals.layer_calls import refilled
from tfdist.keras_internals.model_introspection import bound_to
from tfdist.keras_internals.split_weight import (
    SplitWeight,
    call_with_whole_weights,
    gathered_weights,
    missing_weights,
    with_gathered,
)
from tfdist.patches import patch, replace
from tfdist.strategy_hooks import StrategyHooks, has_hooks, hooks_of, of_running_step
from tfdist.tensorflow_internals.function_graphs import is_symbolic
from tfdist.tensorflow_internals.xla_functions import (
    CannotCompileError,
    call_compiled,
    compiles_on_cpus,
    is_compiling,
    patch_random_numbers,
)
from tfdist.utils.temporary_values import setting_attributes

# The steps of smaller models take a few milliseconds, and compiling takes seconds.
_MIN_PARAMETERS = 1_000_000
_ATTENTION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
)
_SLOWER = tuple(getattr(keras.layers, name) for name in dir(keras.layers) if "Conv" in name)


class _Auto(int):
    """What a model keeps for "auto". It is false, so Keras compiles nothing."""


@patch
def patch_auto_jit_compile() -> None:
    """Makes `jit_compiles` decide on models that are compiled with "auto" under tfdist's strategies."""
    resolve, get_config = TensorFlowTrainer._resolve_auto_jit_compile, TensorFlowTrainer.get_compile_config

    @replace(TensorFlowTrainer, "_resolve_auto_jit_compile")
    def resolve_later(self: Any) -> Any:
        return _Auto() if has_hooks(self.distribute_strategy) else resolve(self)

    @replace(TensorFlowTrainer, "get_compile_config")
    def get_config_with_auto(self: Any) -> dict[str, Any]:
        config = get_config(self)
        return {**config, "jit_compile": "auto"} if config and isinstance(self.jit_compile, _Auto) else config


def jit_compiles(model: Any, data: Any = None) -> bool:
    """Whether XLA is to compile the steps of a built model: as `compile` says, for "auto" where it pays.

    Under a strategy of `tfdist.strategies.planned()` the plan decides, for which steps of the program were measured.
    Without a plan, by `benchmarks/xla.py`, it pays on CPUs for models with attention and without convolutions, of at
    least a million trainable parameters. On GPUs nothing was measured. It never pays if the samples of `data`, a batch,
    have no fixed shape: XLA compiles every shape by itself, for seconds.
    """
    if not isinstance(model.jit_compile, _Auto):
        return bool(model.jit_compile)
    shapes = [leaf.shape for leaf in tf.nest.flatten(data, expand_composites=True) if isinstance(leaf, tf.Tensor)]
    if any(shape.rank is None or None in shape.as_list()[1:] for shape in shapes):
        return False
    if not compiles_on_cpus() or not supports_jit(model):
        return False
    plan = model.distribute_strategy.plan
    if plan is not None:
        return bool(plan.jit_compile)
    layers = model._flatten_layers()
    kinds = {kind for layer in layers for kind in (_ATTENTION, _SLOWER) if isinstance(layer, kind)}
    return kinds == {_ATTENTION} and sum(map(_size, model.trainable_variables)) >= _MIN_PARAMETERS


def jit_compiles_on_workers(model: Any) -> bool:
    """Whether XLA is to compile what workers of parameter servers compute: as `compile` says; for "auto", as a plan.

    Without a plan "auto" compiles nothing, as in Keras under parameter servers.
    """
    if not isinstance(model.jit_compile, _Auto):
        return bool(model.jit_compile)
    plan = model.distribute_strategy.plan
    return plan is not None and bool(plan.jit_compile) and supports_jit(model)


def rejects_xla(model: Any) -> bool:
    """Whether the user has compiled the model with `jit_compile=False`."""
    return not model.jit_compile and not isinstance(model.jit_compile, _Auto)


def _size(variable: keras.Variable) -> int:
    return tf.TensorShape(variable.shape).num_elements() or 0


@patch
def patch_compiled_calls() -> None:
    """Makes Keras compile parts of the steps of models instead of whole steps, under strategies that say when.

    A step of several replicas contains collectives, which XLA cannot compile on CPUs, and which several GPUs of a
    process would start in different orders. A step on a worker reads variables of servers. Only small computations stay
    outside: metrics and the scaling of losses.
    """
    make = TensorFlowTrainer._make_function
    call_layer, call_loss = keras.Layer.__call__, LossFunctionWrapper.call

    def starts_here(args: Any, kwargs: Any) -> bool:
        if not of_running_step(_is_in_compiled_step) or is_compiling():
            return False
        return any(is_symbolic(leaf) for leaf in keras.tree.flatten((args, kwargs)))

    @replace(TensorFlowTrainer, "_make_function")
    def make_uncompiled(self: Any, step_function: Any) -> Any:
        if hooks_of(self.distribute_strategy).compiles_calls is None:
            return make(self, step_function)
        with setting_attributes(self, jit_compile=False):
            return make(self, bound_to(self, step_function))

    @replace(keras.Layer, "__call__")
    def call_with_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call_with_whole_weights(self, functools.partial(call_compiled_layer, self), args, kwargs)

    def call_compiled_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not starts_here(args, kwargs) or not self.built or missing_weights(self):
            return call_layer(self, *args, **kwargs)
        compiled = _compiled(functools.partial(call_layer, self), args, kwargs, layer=self)
        # Layers inside of a layer that is not compiled may be.
        return call_layer(self, *args, **kwargs) if compiled is None else compiled[0]

    @replace(LossFunctionWrapper, "call")
    def call_compiled_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_of_keras = getattr(self.fn, "__module__", "").startswith("keras.")
        if not is_of_keras or is_in_layer_call() or not starts_here(args, kwargs):
            return call_loss(self, *args, **kwargs)
        compiled = _compiled(functools.partial(call_loss, self), args, kwargs)
        return call_loss(self, *args, **kwargs) if compiled is None else compiled[0]

    patch_random_numbers()


def _is_in_compiled_step(hooks: StrategyHooks) -> bool | None:
    is_one = hooks.compiles_calls is not None and hooks.compiles_calls()
    return True if is_one and stateless_scope() is hooks.scope_of_step() else None


def _compiled(function: Callable[..., Any], args: Any, kwargs: Any, layer: Any = None) -> list[Any] | None:
    """Calls `function` compiled, and returns a list of its result, with masks; `None` if XLA does not compile it.

    A layer that adds a loss, or returns one, is not compiled: tfdist could not follow the loss. A layer that keeps a
    tensor in an attribute is not compiled either, because the tensor could not be used elsewhere.
    """
    scope = stateless_scope()
    inputs = [leaf for leaf in keras.tree.flatten((args, kwargs)) if is_symbolic(leaf)]
    masks = [get_mask(tensor) for tensor in inputs]
    weights, gathered = gathered_weights()
    layers = [] if layer is None else list(layer._flatten_layers())
    variables = [] if layer is None or scope is None else layer.variables
    returned: list[Any] = []  # the structure of the outputs, with tensors of the function
    updated: list[keras.Variable] = []

    def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
        inner_args, inner_kwargs = refilled((args, kwargs), is_symbolic, tensors)
        first = len(inputs) + len(weights)
        values = dict(zip(map(id, variables), tensors[first:], strict=True))
        for tensor, mask in zip(tensors, masks, strict=False):
            if mask is not None:
                set_mask(tensor, mask)
        given = contextlib.nullcontext() if scope is None else _GivenValues(variables, values)
        with with_gathered(weights, tensors[len(inputs) : first]), given as inner:
            returned[:] = [function(*inner_args, **inner_kwargs)]
        adds_loss = any(flat_layer._losses for flat_layer in layers) or (inner is not None and inner.losses)
        if adds_loss or not all(map(_can_leave, keras.tree.flatten(returned))) or any(map(_keeps_tensor, layers)):
            raise CannotCompileError
        results = _tensors(returned)
        updates = [] if inner is None else inner.updates()
        updated[:] = [variable for variable, _ in updates]
        inner_masks = [mask for mask in map(get_mask, results) if mask is not None]
        return [*results, *inner_masks, *(tf.stop_gradient(value) for _, value in updates)]

    before = [(list(flat_layer._losses), set(flat_layer._loss_ids)) for flat_layer in layers]
    read = layer.trainable_variables if layer is not None and scope is None else []
    read = [variable for variable in read if not isinstance(variable, SplitWeight)]
    values = [_value_in(scope, variable) for variable in variables]
    called = None
    try:
        called = call_compiled(traced, [*inputs, *gathered], [variable.value.handle for variable in read], values)
    finally:
        if called is None:
            for flat_layer, (losses, ids) in zip(layers, before, strict=True):
                flat_layer._losses[:] = losses
                flat_layer._loss_ids.clear()
                flat_layer._loss_ids.update(ids)
    if called is None:
        return None
    results = iter(called)
    inner_outputs = _tensors(returned)
    outputs = [next(results) for _ in inner_outputs]
    for output, mask in zip(outputs, map(get_mask, inner_outputs), strict=True):
        if mask is not None:
            set_mask(output, next(results))
    for variable, value in zip(updated, results, strict=True):
        scope.add_update((variable, value))
    return list(refilled(returned, tf.is_tensor, outputs))


class _GivenValues(keras.StatelessScope):
    """A scope in which variables have given values. Another variable is on a server, so the reader is not compiled."""

    def __init__(self, variables: Sequence[keras.Variable], values: dict[int, tf.Tensor]) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        # Keras' constructor would cast them to the dtype to which an enclosing layer casts variables.
        self.state_mapping = {id(variable): values[id(variable)] for variable in variables}
        self._variables, self._given = variables, dict(self.state_mapping)
        self._graph = tf.compat.v1.get_default_graph()

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        value = super().get_current_value(variable)
        # A `tf.function` of the user would keep the tensor in its trace.
        if value is None or tf.compat.v1.get_default_graph() is not self._graph:
            raise CannotCompileError
        return value

    def updates(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """The variables that have been assigned to, with their last values."""
        now = [(variable, self.state_mapping[id(variable)]) for variable in self._variables]
        return [(variable, value) for variable, value in now if value is not self._given[id(variable)]]


def _value_in(scope: Any, variable: keras.Variable) -> tuple[tf.TensorSpec, Callable[[], tf.Tensor]]:
    """The spec of a variable, and a function that returns its value in `scope`."""

    def read() -> tf.Tensor:
        value = scope.get_current_value(variable)
        return tf.convert_to_tensor(variable._value if value is None else value)

    return tf.TensorSpec(variable.shape, variable._value.dtype), read


def _keeps_tensor(layer: Any) -> bool:
    """Whether an attribute of a layer is or contains a tensor of the function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    waiting, seen = [*vars(layer).values()], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
        elif is_symbolic(value) and value.graph is graph:
            return True
    return False


def _can_leave(output: Any) -> bool:
    """Whether a part of a layer's result can leave a compiled function: constants, and dense tensors except scalars."""
    if isinstance(output, tf.Tensor):
        return output.shape.rank != 0
    return output is None or isinstance(output, bool | int | float | str)


def _tensors(structure: Any) -> list[tf.Tensor]:
    return [leaf for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]
