"""`jit_compile` on several replicas: XLA compiles the calls of layers and the losses of samples within a step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import (
    LossFunctionWrapper,
    TensorFlowTrainer,
    get_mask,
    in_stateless_scope,
    is_in_layer_call,
    set_mask,
    tree,
)
from tfdist.tensorflow_internals.sample_degrees import is_symbolic
from tfdist.tensorflow_internals.xla_functions import (
    CannotCompileError,
    call_compiled,
    is_compiling,
    patch_random_numbers,
)


def patch_compiled_calls(is_ours: Callable[[Any], bool], compiles: Callable[[], bool]) -> None:
    """Makes Keras compile parts of the steps of models whose strategy `is_ours` instead of whole steps.

    A step of several replicas contains collectives, which XLA cannot compile on CPUs, and which several GPUs of a
    process would start in different orders. What is left outside is small: metrics, the scaling of losses.

    Args:
        is_ours: Whether a strategy is one of tfdist's.
        compiles: Whether a step is running whose calls are to be compiled.
    """
    make = TensorFlowTrainer._make_function
    call_layer, call_loss = keras.Layer.__call__, LossFunctionWrapper.call

    def starts_here(args: Any, kwargs: Any) -> bool:
        if not compiles() or is_compiling() or in_stateless_scope():
            return False
        return any(is_symbolic(leaf) for leaf in tree.flatten((args, kwargs)))

    @functools.wraps(make)
    def make_uncompiled(self: Any, step_function: Any) -> Any:
        jit_compile = self.jit_compile
        if not is_ours(self.distribute_strategy):
            return make(self, step_function)
        self._jit_compile = False
        try:
            return make(self, step_function)
        finally:
            self._jit_compile = jit_compile

    @functools.wraps(call_layer)
    def call_compiled_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not starts_here(args, kwargs) or not self.built:
            return call_layer(self, *args, **kwargs)
        compiled = _compiled(functools.partial(call_layer, self), args, kwargs, layer=self)
        return call_layer(self, *args, **kwargs) if compiled is None else compiled[0]  # what is in it may be compiled

    @functools.wraps(call_loss)
    def call_compiled_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_of_keras = getattr(self.fn, "__module__", "").startswith("keras.")
        if not is_of_keras or is_in_layer_call() or not starts_here(args, kwargs):
            return call_loss(self, *args, **kwargs)
        compiled = _compiled(functools.partial(call_loss, self), args, kwargs)
        return call_loss(self, *args, **kwargs) if compiled is None else compiled[0]

    TensorFlowTrainer._make_function = make_uncompiled
    keras.Layer.__call__ = call_compiled_layer
    LossFunctionWrapper.call = call_compiled_loss
    patch_random_numbers()


def _compiled(function: Callable[..., Any], args: Any, kwargs: Any, layer: Any = None) -> list[Any] | None:
    """Calls `function` compiled, and returns a list of its result, with masks; `None` if XLA does not compile it.

    A layer that adds a loss, or returns one, is not compiled: tfdist could not follow the loss.
    """
    given = [leaf for leaf in tree.flatten((args, kwargs)) if is_symbolic(leaf)]
    masks = [get_mask(tensor) for tensor in given]
    layers = [] if layer is None else list(layer._flatten_layers())
    before = [(list(one._losses), set(one._loss_ids)) for one in layers]
    returned: list[Any] = []  # the structure of the outputs, with tensors of the function

    def traced(*tensors: tf.Tensor) -> list[tf.Tensor]:
        for tensor, mask in zip(tensors, masks, strict=True):
            if mask is not None:
                set_mask(tensor, mask)
        remaining = iter(tensors)
        inner_args, inner_kwargs = tree.map_structure(
            lambda leaf: next(remaining) if is_symbolic(leaf) else leaf, (args, kwargs)
        )
        returned[:] = [function(*inner_args, **inner_kwargs)]
        if any(one._losses for one in layers) or not all(map(_can_leave, tree.flatten(returned))):
            raise CannotCompileError
        results = _tensors(returned)
        return [*results, *_masks(results)]

    handles = [] if layer is None else [variable.value.handle for variable in layer.trainable_variables]
    called = None
    try:
        called = call_compiled(traced, given, handles)
    finally:
        if called is None:
            for one, (losses, ids) in zip(layers, before, strict=True):
                one._losses[:] = losses
                one._loss_ids.clear()
                one._loss_ids.update(ids)
    if called is None:
        return None
    results = iter(called)
    inner = _tensors(returned)
    outputs = [next(results) for _ in inner]
    for output, mask in zip(outputs, map(get_mask, inner), strict=True):
        if mask is not None:
            set_mask(output, next(results))
    remaining = iter(outputs)
    return list(tree.map_structure(lambda leaf: next(remaining) if tf.is_tensor(leaf) else leaf, returned))


def _can_leave(output: Any) -> bool:
    """Whether a part of a layer's result can leave a compiled function: a constant, a dense tensor but no scalar."""
    if isinstance(output, tf.Tensor):
        return output.shape.rank != 0
    return output is None or isinstance(output, bool | int | float | str)


def _tensors(structure: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tree.flatten(structure) if tf.is_tensor(leaf)]


def _masks(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [mask for mask in map(get_mask, tensors) if mask is not None]
