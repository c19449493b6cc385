"""Methods that are decorated by `tf.function`, which a step of several replicas traces within its own graph."""

import inspect
import types
from typing import Any

import tensorflow as tf

from tfdist.private_symbols import private
from tfdist.tensorflow_internals.xla_functions import is_compiling

_FUNCTION = "tensorflow.python.eager.polymorphic_function"
_in_xla_context = private(
    "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
    "whether a function is being traced that XLA will compile",
)
_convert = private("tensorflow.python.autograph.impl.api:convert", "traces Python's conditions as functions do")
_ag_ctx = private("tensorflow.python.autograph.core:ag_ctx", "whether it does so")
_Target = private(f"{_FUNCTION}.tf_method_target:TfMethodTarget", "the object of a decorated method")
_Function = private(
    f"{_FUNCTION}.polymorphic_function:Function",
    "keeps in `_jit_compile` and `_autograph` how a decorated method is traced",
)


def python_function_of(function: Any) -> Any:
    """Returns the function, or the bound method, of which a `tf.function` was made; another function itself."""
    if not isinstance(function, _Function):
        return function
    original = function.python_function
    method = original if inspect.ismethod(original) else getattr(original, "__wrapped__", None)
    if not inspect.ismethod(method) or not isinstance(method.__self__, _Target):
        return original
    return types.MethodType(method.__func__, method.__self__.target)


def inlined(function: Any) -> Any:
    """Returns what to call in place of a `tf.function`, to trace it in the caller's graph; another function itself.

    A separate function is traced once for all replicas of a process that look alike, with the first one's variables,
    and XLA cannot compile the collectives in it.
    """
    original = python_function_of(function)
    if original is function or not function._autograph:
        return original
    return _convert(recursive=True, conversion_ctx=_ag_ctx.ControlStatusCtx(_ag_ctx.Status.ENABLED))(original)


def is_compiled(function: Any) -> bool:
    """Whether a function is a `tf.function` with `jit_compile=True`."""
    return isinstance(function, _Function) and bool(function._jit_compile)


def is_in_compiled_function() -> bool:
    """Whether a `tf.function` with `jit_compile=True` is being traced that the user's code calls."""
    return not (tf.executing_eagerly() or is_compiling()) and bool(_in_xla_context(tf.compat.v1.get_default_graph()))


def reject_exchange_in_compiled_function() -> None:
    """Raises an error while such a function is being traced. Call this before replicas exchange anything."""
    if is_in_compiled_function():
        raise ValueError(
            "XLA cannot compile what replicas exchange. Received: a `tf.function(jit_compile=True)` that updates "
            "variables by an optimizer, reduces over the replicas, or calls `strategy.run`. Expected: computations of "
            "one replica. Leave out `jit_compile=True` there, or give it to the part that only computes. A model that "
            "is compiled with `model.compile(..., jit_compile=True)`, or whose `train_step` is decorated as a whole, "
            "has its layers compiled."
        )
