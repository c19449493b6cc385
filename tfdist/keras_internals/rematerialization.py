"""Rematerialization in stages: a function whose intermediate results are computed again in the backward pass.

A stage takes the values of variables as arguments, and `tf.recompute_grad` gives no gradients of tensors that a
function captures. Here the function is traced once, so that the second computation has the same random numbers, casts
and arguments as the first one, and takes the values as arguments.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_symbols import get_mask, set_mask, stateless_scope
from tfdist.keras_internals.layer_calls import refilled
from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import of_running_step

_core = private("keras.src.backend.tensorflow:core", "rematerializes by a function that differentiates variables only")
_is_symbolic = private("keras.src.backend.common.symbolic_scope:in_symbolic_scope", "whether only shapes are computed")


@patch
def patch_rematerialization() -> None:
    """Replaces rematerialized calls in models in stages; their steps say whether calls are computed again."""
    stock = _core.remat

    @replace(_core, "remat")
    def remat(f: Callable[..., Any]) -> Callable[..., Any]:
        rematerialized = stock(f)

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> Any:
            recomputed = of_running_step(lambda hooks: hooks.is_recomputed())
            if recomputed is None:
                return rematerialized(*args, **kwargs)
            return _TracedCall(f, args, kwargs)() if recomputed and not _is_symbolic() else f(*args, **kwargs)

        return call


class _TracedCall:
    """A call whose function is traced, with the values of Keras' variables as arguments."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function, self._arguments = function, (args, kwargs)
        self._tensors = list(filter(_is_tensor, keras.tree.flatten((args, kwargs))))
        self._masks = [get_mask(tensor) for tensor in self._tensors]
        self._scope = stateless_scope()

    def __call__(self) -> Any:
        """Computes the result. Updates of variables and losses of layers reach the scope around the call."""
        owner = getattr(self._function, "__self__", None)
        owner_variable_ids = [id(variable) for variable in getattr(owner, "variables", ())]
        known = self._scope.state_mapping
        traced = self._traced([key for key in known if key in owner_variable_ids])
        if traced.captured_inputs:
            traced = self._traced(list(known))
        if traced.captured_inputs:
            name = getattr(owner, "name", getattr(self._function, "__name__", "a function"))
            used = [(captured.dtype.name, tuple(captured.shape)) for captured in traced.captured_inputs]
            raise ValueError(
                f"A rematerialized function in a stage uses tensors that are not its arguments. Received: {name!r}, "
                f"which uses {used}. Expected: a function of its arguments and of Keras' variables, as it is computed "
                "again without these tensors. Add them to its arguments."
            )
        results = _recomputed(traced, [*self._given, *(known[key] for key in self._keys)])
        return self._unpacked(results)

    @property
    def _given(self) -> list[tf.Tensor]:
        return [*self._tensors, *(mask for mask in self._masks if mask is not None)]

    def _traced(self, keys: list[int]) -> Any:
        """Traces the function for the values of the variables whose ids are `keys`."""
        self._keys = keys
        values = [tf.convert_to_tensor(self._scope.state_mapping[key]) for key in keys]
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in [*self._given, *values]]
        traced = tf.function(self._run, autograph=False, experimental_attributes={"_noinline": True})
        return traced.get_concrete_function(*specs)

    def _run(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        waiting = iter(inputs)
        tensors = [next(waiting) for _ in self._tensors]
        for tensor, mask in zip(tensors, self._masks, strict=True):
            if mask is not None:
                set_mask(tensor, next(waiting))
        before = dict(zip(self._keys, waiting, strict=True))
        args, kwargs = refilled(self._arguments, _is_tensor, tensors)
        inner = keras.StatelessScope(collect_losses=True)
        inner.state_mapping = dict(before)
        with inner:
            self._outputs = self._function(*args, **kwargs)
        outputs = list(filter(_is_tensor, keras.tree.flatten(self._outputs)))
        masks = [get_mask(leaf) for leaf in outputs]
        self._has_mask = [mask is not None for mask in masks]
        changed = {key: value for key, value in inner.state_mapping.items() if value is not before.get(key)}
        self._changed, self._num_losses = list(changed), len(inner.losses)
        return [*outputs, *(mask for mask in masks if mask is not None), *changed.values(), *inner.losses]

    def _unpacked(self, results: Sequence[tf.Tensor]) -> Any:
        waiting = iter(results)
        outputs = [next(waiting) for _ in self._has_mask]
        for output, has_mask in zip(outputs, self._has_mask, strict=True):
            if has_mask:
                set_mask(output, next(waiting))
        for key in self._changed:
            self._scope.state_mapping[key] = next(waiting)
        for _ in range(self._num_losses):
            self._scope.add_loss(next(waiting))
        return refilled(self._outputs, _is_tensor, outputs)


def _recomputed(function: Any, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns `function(*arguments)`; the backward pass keeps the arguments only and calls the function again."""

    @tf.custom_gradient
    def call(*inputs: tf.Tensor) -> Any:
        outputs = [tf.identity(tensor) for tensor in function(*inputs)]

        def gradients(*upstream: Any) -> list[Any]:
            known = [
                index for index, tensor in enumerate(upstream) if tensor is not None and _has_gradient(outputs[index])
            ]
            # Not before the gradients have arrived: otherwise all functions of a stage would be computed at its start.
            with tf.control_dependencies([upstream[index] for index in known]):
                again = [tf.identity(tensor) for tensor in inputs]
            sources = [index for index, tensor in enumerate(again) if _has_gradient(tensor)]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([again[index] for index in sources])
                results = function(*again)
            source_gradients = tape.gradient(
                [results[index] for index in known],
                [again[index] for index in sources],
                [upstream[index] for index in known],
            )
            result: list[Any] = [None] * len(inputs)
            for index, gradient in zip(sources, source_gradients, strict=True):
                result[index] = gradient
            return result

        return outputs, gradients

    return list(call(*arguments))


def _has_gradient(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor)
