"""Operations of the methods have kernels for GPUs, as TensorFlow's registry tells on any machine."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from methods import KINDS, METHODS
from tensorflow.python.framework import kernels

pytestmark = pytest.mark.usefixtures("cpus")

ON_GPUS = ("GPU", "DEFAULT")
# Control flow and constants of functions; a GPU's placer looks into the functions.
WITHOUT_KERNELS = {"PartitionedCall", "StatefulPartitionedCall", "NoOp"}
# Computed on the host where tensors are short; XLA compiles the encoding of long ones.
ON_THE_HOST = {"sign": ["Sum"]}


@functools.cache
def gpu_kernels(op_type):
    registered = kernels.get_registered_kernels_for_op(op_type).kernel
    return [kernel for kernel in registered if kernel.device_type in ON_GPUS]


def has_gpu_kernel(op_type, attributes):
    """Whether a kernel for GPUs takes these attributes, a dict of names and dtypes."""

    def fits(kernel):
        return all(
            attributes.get(constraint.name) in (None, *constraint.allowed_values.list.type)
            for constraint in kernel.constraint
        )

    return any(map(fits, gpu_kernels(op_type)))


def operations(function):
    """Returns the operations of a concrete function and of all functions that it calls."""
    graphs, found = [function.graph], []
    for graph in graphs:
        found += graph.get_operations()
        graphs += [inner.graph for inner in getattr(graph, "_functions", {}).values() if hasattr(inner, "graph")]
    return found


def dtypes_of(operation):
    names = {attribute.name for attribute in operation.op_def.attr if attribute.type == "type"}
    return {name: operation.get_attr(name).as_datatype_enum for name in names}


def missing_kernels(function):
    missing = []
    for operation in operations(function):
        if operation.type in WITHOUT_KERNELS:
            continue
        dtypes = dtypes_of(operation)
        if not has_gpu_kernel(operation.type, dtypes):
            missing.append((operation.type, operation.name))
        # Of a sum of sums of one shape TensorFlow makes an `AddN`.
        terms = [term.op.type for term in operation.inputs if term.shape == operation.outputs[0].shape]
        if operation.type == "AddV2" and "AddV2" in terms and not has_gpu_kernel("AddN", dtypes):
            missing.append(("AddN", operation.name))
    return missing


@pytest.fixture(autouse=True)
def build_with_gpu_kernels():
    if not has_gpu_kernel("MatMul", {"T": tf.float32.as_datatype_enum}):
        pytest.skip("this TensorFlow was built without kernels for GPUs")


def test_the_registry_is_read_as_a_placer_reads_it():
    @tf.function
    def of_integers(x):
        return x + x + x

    @tf.function
    def of_strings(x):
        return tf.strings.length(x)

    for dtype, expected in ((tf.float32, []), (tf.int16, ["AddN"])):
        function = of_integers.get_concrete_function(tf.TensorSpec([3], dtype))
        assert [kind for kind, _ in missing_kernels(function)] == expected
    function = of_strings.get_concrete_function(tf.TensorSpec([3], tf.string))
    assert "StringLength" in [kind for kind, _ in missing_kernels(function)]


@pytest.mark.parametrize("name", [*KINDS, "fp16", "int8"])
def test_encoding_and_decoding_run_on_gpus(name):
    compressor, shape = METHODS[name], (33, 64)
    state = compressor.initial_state(shape)

    @tf.function
    def encode_and_decode(gradient):
        payload, new_state = compressor.encode(gradient, state)
        return compressor.decode(payload, shape), new_state

    function = encode_and_decode.get_concrete_function(tf.TensorSpec(shape, tf.float32))
    assert len(operations(function)) > 3
    assert [kind for kind, _ in missing_kernels(function)] == ON_THE_HOST.get(name, [])
    assert np.isfinite(function(tf.ones(shape))[0].numpy()).all()
