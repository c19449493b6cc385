"""Compiles parts of a replica's step by XLA, which cannot compile collectives; inlines the `tf.function`s in it."""

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.tensorflow_internals.function_graphs import CONDITIONS, LOOPS, PLAIN_CALLS, called_graph, operations_behind
from tfdist.utils.temporary_values import setting

_random = private(
    "tensorflow.python.ops:random_ops_util",
    "selects the algorithm of random numbers by an operation for which XLA has no kernel on CPUs",
)
_kernels = private("tensorflow.python.framework:kernels", "which operations XLA knows")
_operations = private("tensorflow.python.ops:gen_stateless_random_ops_v2", "makes floats of other bits than XLA does")
_pack_tangents = private("tensorflow.python.eager.forwardprop_util:pack_tangents", "whether an accumulator is active")
_VECTORIZED = "loop_body"  # the name scope of what `tf.vectorized_map` maps
# XLA compiles the first ones badly or not at all, and draws other numbers than TensorFlow for the last ones.
_LEFT_OUT = (
    LOOPS
    | CONDITIONS
    | frozenset({"Case", "StatelessCase", "Where", "Unique", "UniqueV2", "UniqueWithCounts", "DynamicPartition"})
    | frozenset(
        "Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoissonV2 RandomShuffle RandomStandardNormal "
        "RandomUniform RandomUniformInt StatelessMultinomial StatelessRandomGammaV3 StatelessRandomNormalV2 "
        # Uniform numbers are made otherwise, unless a `tf.function` was traced before.
        "StatelessRandomUniformV2 StatelessShuffle StatelessTruncatedNormalV2 TruncatedNormal".split()
    )
)
_DIFFERENTIABLE = frozenset({tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.resource})
# The bits of the mantissa, those of 1, and an integer type of the same size.
_FLOATS = {
    tf.float32: (0x7FFFFF, 0x3F800000, tf.uint32),
    tf.float16: (0x3FF, 0x3C00, tf.uint16),
    tf.bfloat16: (0x7F, 0x3F80, tf.uint16),
}
_other_cpus: tuple[int, ...] = ()  # workers whose CPUs differ from that of worker 0
_is_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar("tfdist_is_compiling", default=False)
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


class CannotCompileError(Exception):
    """Raised while a function is being traced for XLA, by what XLA cannot compile."""


def is_compiling() -> bool:
    """Whether a function is being traced that XLA will compile."""
    return _is_compiling.get()


def call_compiled(
    function: Callable[..., Sequence[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
    handles: Sequence[tf.Tensor] = (),
    values: Sequence[tuple[tf.TensorSpec, Callable[[], tf.Tensor]]] = (),
) -> list[tf.Tensor] | None:
    """Calls `function(*tensors)` in a graph as one computation of XLA, on the device of this replica.

    Gradient tapes differentiate it, by a second computation, to which the first one passes what it needs. XLA cannot
    pass on the values of a loop's turns, or of a branch, and compiles tensors of other sizes again.

    Args:
        function: Returns a list of tensors. It may read variables of this replica and assign them.
        tensors: Its arguments, dense tensors of numbers.
        handles: Those of the variables that it reads, as far as they are known.
        values: Further arguments, each a spec and what returns the tensor, which is called if the function is.

    Returns:
        What `function` returned; `None` if nothing was called, because

        - `function` raises `CannotCompileError`, for instance because it contains a collective, or another error;
        - it contains a loop, a condition, random numbers that XLA draws otherwise, an operation whose result's size
          depends on values, or one that XLA does not know;
        - with `values`, it reads other variables, or its gradient may;
        - its outputs depend on different inputs or variables: those of an unused output would get zeros as gradients;
        - a forward accumulator or `tf.vectorized_map` is active: a tape could not differentiate what these make of it.
    """
    if _pack_tangents([*tensors, *handles]).indices or _VECTORIZED in tf.get_current_name_scope().split("/"):
        return None

    def traced(*arguments: tf.Tensor) -> list[tf.Tensor]:
        with setting(_is_compiling, True):
            return list(function(*arguments))

    specs = [*(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors), *(spec for spec, _ in values)]
    try:
        # A call of the function itself would count as retracing, of which TensorFlow warns.
        concrete = tf.function(traced, jit_compile=True, autograph=False).get_concrete_function(*specs)
    except Exception:  # the call without XLA will raise it, too, if it is not about XLA
        return None
    graph = concrete.graph
    outputs = [output for output in graph.outputs if output.dtype.is_floating or output.dtype.is_complex]
    differ = len({_sources(output) for output in outputs} - {frozenset()}) > 1
    if differ or _contains(graph, _is_left_out) or (values and _reads_variables(graph)):
        return None
    return list(concrete(*tensors, *(read() for _, read in values)))


def _contains(graph: Any, is_one: Callable[[Any], bool]) -> bool:
    """Whether the graph of a function, or of one that it calls, has an operation for which `is_one` is true."""
    for operation in graph.get_operations():
        if is_one(operation):
            return True
        called = called_graph(graph, operation.get_attr("f").name) if operation.type in PLAIN_CALLS else None
        if called is not None and _contains(called, is_one):
            return True
    return False


def _is_left_out(operation: Any) -> bool:
    return operation.type in _LEFT_OUT or not _is_known_to_xla(operation.type)


@functools.cache
def _is_known_to_xla(operation_type: str) -> bool:
    _register_kernels()
    kernels = _kernels.get_registered_kernels_for_op(operation_type).kernel
    return operation_type == "Placeholder" or not kernels or any("XLA_" in kernel.device_type for kernel in kernels)


def compiles_on_cpus() -> bool:
    """Whether TensorFlow has XLA, CPUs are all the devices of this process, and those of all workers are alike."""
    return not _other_cpus and _has_cpus_only() and _register_kernels()


def leave_xla_to_users(workers: Sequence[int]) -> None:
    """Makes `compiles_on_cpus` false from now on, because `workers` have other CPUs than worker 0.

    XLA uses all instructions of a CPU, so its results, and with them the weights of workers, would differ in the last
    bit. TensorFlow's kernels for values one by one are the same on all CPUs.
    """
    global _other_cpus
    _other_cpus = tuple(workers)


def workers_with_other_cpus() -> tuple[int, ...]:
    """Returns the workers on whose CPUs XLA's results may differ from those of worker 0; none if GPUs compute."""
    return _other_cpus if _has_cpus_only() else ()


@functools.cache
def _has_cpus_only() -> bool:
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


@functools.cache
def _register_kernels() -> bool:
    """Makes TensorFlow list the kernels of XLA, which it does when it compiles; returns whether it can compile."""
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            tf.function(lambda x: x + 1, jit_compile=True, autograph=False)(tf.constant(0))
    except (tf.errors.OpError, ValueError):
        return False
    return True


def _reads_variables(graph: Any) -> bool:
    """Whether a function, or a gradient that Python code defines, may read variables of servers."""
    if any(placeholder.dtype == tf.resource for _, placeholder in graph.captures):
        return True
    return _contains(
        graph, lambda operation: operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr
    )


def _sources(output: tf.Tensor) -> frozenset[str]:
    """The names of the inputs of a function's graph, among them variables, by which an output can be differentiated."""
    behind = operations_behind(output.op, inputs_of=lambda user: () if user.type == "StopGradient" else user.inputs)
    placeholders = [operation for operation in behind if operation.type == "Placeholder"]
    return frozenset(operation.name for operation in placeholders if operation.outputs[0].dtype in _DIFFERENTIABLE)


@patch
def patch_random_numbers() -> None:
    """Makes functions that XLA will compile draw the numbers that TensorFlow draws on CPUs and GPUs without XLA.

    TensorFlow selects Philox there, XLA another algorithm. And XLA makes floats of other bits of the same integers:
    those of uniform numbers (dropout) are made here, so that they are the same. What draws others is not compiled.
    """
    select, draw_uniform = _random.get_key_counter_alg, _operations.stateless_random_uniform_v2

    @replace(_random, "get_key_counter_alg")
    def select_philox(seed: Any, alg: Any) -> Any:
        if not is_compiling() or tf.is_tensor(alg):
            return select(seed, alg)
        is_automatic = alg is None or _random.convert_alg_to_int(alg) == tf.random.Algorithm.AUTO_SELECT.value
        return select(seed, "philox" if is_automatic else alg)

    @replace(_operations, "stateless_random_uniform_v2")
    def draw_equal(shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None) -> Any:
        layout = _FLOATS.get(tf.as_dtype(dtype))
        if not is_compiling():
            return draw_uniform(shape, key=key, counter=counter, alg=alg, dtype=dtype, name=name)
        if layout is None:
            raise CannotCompileError
        mantissa, one, integer = layout
        bits = _operations.stateless_random_uniform_full_int_v2(shape, key, counter, alg, dtype=tf.uint32)
        mantissas = tf.cast(bits & tf.constant(mantissa, tf.uint32), integer)
        ones = tf.bitcast(mantissas | tf.constant(one, integer), dtype)  # from 1 to 2
        return ones - tf.cast(1, dtype)


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
