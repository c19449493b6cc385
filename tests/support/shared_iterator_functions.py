"""Shares the functions of iterators over several devices, whose tracing took a twentieth of a small training.

For each device of each iterator, TensorFlow traces six functions that differ in nothing but the tensors that they
capture: the iterator's handle, its incarnation, and the device of the dataset. Here they are traced for the first
iterator of a kind, and later ones pass their own tensors.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops import multi_device_iterator_ops as iterators
from tensorflow.python.eager import context
from tensorflow.python.ops import gen_dataset_ops

_FUNCTIONS = ("init", "next", "finalize")
_trace = iterators._PerDeviceGenerator.__init__
# By kind: the functions, what each of their captured tensors is, these tensors, and the position of the incarnation.
_traced: dict[Any, tuple[list[Any], list[list[str]], dict[str, Any], int]] = {}


def _create(generator: Any) -> None:
    """Creates the dataset of a generator's functions and their tensors."""
    variant = gen_dataset_ops.generator_dataset(
        *(getattr(generator, f"_{name}_captured_args") for name in _FUNCTIONS),
        **{f"{name}_func": getattr(generator, f"_{name}_func") for name in _FUNCTIONS},
        **generator._flat_structure,
    )
    dataset_ops.DatasetV2.__init__(generator, variant)


def _generator(
    self: Any,
    shard_num: int,
    multi_device_iterator_resource: Any,
    incarnation_id: Any,
    source_device: Any,
    element_spec: Any,
    iterator_is_anonymous: bool,
) -> None:
    """Replaces `_PerDeviceGenerator.__init__`."""
    arguments = (incarnation_id, source_device, element_spec, iterator_is_anonymous)
    if not tf.executing_eagerly():
        _trace(self, shard_num, multi_device_iterator_resource, *arguments)
        return
    kind = (shard_num, source_device.numpy(), repr(element_spec), iterator_is_anonymous, context.context().device_name)
    if kind not in _traced:
        _trace(self, shard_num, multi_device_iterator_resource, *arguments)
        tensors = {"resource": multi_device_iterator_resource, "incarnation": incarnation_id, "device": source_device}
        names = {id(tensor): name for name, tensor in tensors.items()}
        captured = [
            [names.get(id(tensor), "handle") for tensor in getattr(self, f"_{name}_captured_args")]
            for name in _FUNCTIONS
        ]
        functions = [getattr(self, f"_{name}_func") for name in _FUNCTIONS]
        _traced[kind] = functions, captured, tensors, self._incarnation_id_index
        return
    functions, captured, _, self._incarnation_id_index = _traced[kind]
    tensors = {
        "resource": multi_device_iterator_resource,
        "incarnation": incarnation_id,
        "device": source_device,
        "handle": gen_dataset_ops.multi_device_iterator_to_string_handle(multi_device_iterator_resource),
    }
    self._element_spec, self._name = element_spec, f"device_generator_{shard_num}"
    for name, function, names_of_captured in zip(_FUNCTIONS, functions, captured, strict=True):
        setattr(self, f"_{name}_func", function)
        setattr(self, f"_{name}_captured_args", [tensors[captured_name] for captured_name in names_of_captured])
    _create(self)


def _reincarnated(self: Any, per_device_dataset: Any, incarnation_id: Any) -> None:
    """Replaces `_ReincarnatedPerDeviceGenerator.__init__`: takes the tensors of the dataset, not of its functions."""
    self._element_spec, self._name = per_device_dataset.element_spec, getattr(per_device_dataset, "_name", None)
    for name in _FUNCTIONS:
        for attribute in (f"_{name}_func", f"_{name}_captured_args"):
            setattr(self, attribute, getattr(per_device_dataset, attribute))
    self._next_captured_args[per_device_dataset._incarnation_id_index] = incarnation_id
    _create(self)


def install() -> None:
    """Creates all later iterators of this process by shared functions."""
    iterators._PerDeviceGenerator.__init__ = _generator
    iterators._ReincarnatedPerDeviceGenerator.__init__ = _reincarnated
