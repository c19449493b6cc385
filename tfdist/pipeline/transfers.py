"""Tensors that devices send to each other: sums, gathers and exchanges by copies, and counters of their bytes.

What is sent is recorded while a step is traced, and counted when it is executed.
"""

import contextvars
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable
from tfdist.utils.temporary_values import setting

BATCH, ACTIVATION, ACTIVATION_GRADIENT = "batch_bytes", "activation_bytes", "activation_gradient_bytes"
WEIGHT_GRADIENT, WEIGHT, PREDICTION = "weight_gradient_bytes", "weight_bytes", "prediction_bytes"
DENSE = "dense_bytes"  # what weight gradients would be without compression

_current: contextvars.ContextVar["Transfers | None"] = contextvars.ContextVar("tfdist_transfers", default=None)


class Transfers:
    """The bytes of one step by source, target and kind. A tensor that a device uses several times is sent to it once.

    Tensors of static shape cost nothing in the step. Where the rows of a micro-batch are unknown, the process that
    splits the batch knows them. Only of tensors with further unknown axes the source computes the size.
    """

    def __init__(self, chief: str) -> None:
        """Starts with nothing; `chief` is the device of batches, and of tensors without a device."""
        self._chief, self._graph = chief, tf.compat.v1.get_default_graph()
        self._seen: set[tuple[bool, Any, str]] = set()
        self._fixed: dict[tuple[str, str, str], int] = defaultdict(int)
        self._by_rows: dict[tuple[str, str, str], dict[Any, int]] = defaultdict(lambda: defaultdict(int))
        self._sizes: dict[tuple[str, str, str], list[tf.Tensor]] = defaultdict(list)

    def recording(self) -> AbstractContextManager[None]:
        """Records the transfers that the body announces by `record_transfer`."""
        return setting(_current, self)

    def add(self, kind: str, tensor: tf.Tensor, target: str, rows: Any, share: float) -> None:
        """Records a tensor; see `record_transfer`."""
        source = tensor.device or self._chief
        if source == target or tensor.shape.rank == 0 or (kind == DENSE, tensor.ref(), target) in self._seen:
            return
        self._seen.add((kind == DENSE, tensor.ref(), target))
        key, size, of_row = (source, target, kind), tensor.dtype.size, tensor.shape[1:].num_elements()
        if tensor.shape.num_elements() is not None:
            self._fixed[key] += round(tensor.shape.num_elements() * size * share)
        elif of_row is not None and isinstance(rows, int):
            self._fixed[key] += rows * of_row * size
        elif of_row is not None and rows is not None:
            self._by_rows[key][rows.ref()] += of_row * size
        elif tensor.graph is self._graph:  # what only a branch of the step knows is not counted
            # A tensor of the step may be sent within a branch; the sum is outside of it.
            with self._graph.as_default(), tf.control_dependencies(None), tf.device(source):
                self._sizes[key].append(tf.size(tensor, out_type=tf.int64) * size)

    def total(self) -> dict[tuple[str, str, str], "int | tf.Tensor"]:
        """Returns the bytes of the step by source, target and kind; int64 scalars where the shapes are dynamic."""
        keys = sorted({*self._fixed, *self._by_rows, *self._sizes})
        with tf.device(self._chief):
            return {key: self._sum(key) for key in keys}

    def _sum(self, key: tuple[str, str, str]) -> "int | tf.Tensor":
        dynamic = list(self._sizes[key])
        if factors := self._by_rows[key]:
            rows = tf.stack([tf.cast(ref.deref(), tf.int64) for ref in factors])
            dynamic.append(tf.reduce_sum(rows * tf.constant(list(factors.values()), tf.int64)))
        return tf.add_n(dynamic) + self._fixed[key] if dynamic else self._fixed[key]


def unrecorded(function: Callable[[], None]) -> Callable[[], None]:
    """Returns `function` such that the transfers which it announces are not recorded."""

    def called() -> None:
        with setting(_current, None):
            function()

    return called


def record_transfer(kind: str, tensors: Iterable[Any], target: str, *, rows: Any = None, share: float = 1.0) -> None:
    """Announces that operations on the device `target` use tensors or `tf.IndexedSlices` of another device.

    The `kind` is the name of a field of `LinkStats`. `rows` is the size of the first axis if it is not static: an int,
    or an int scalar on the device of batches. A `share` of tensors of static shape is sent.
    """
    transfers = _current.get()
    if transfers is None:
        return
    for tensor in tensors:
        if isinstance(tensor, tf.IndexedSlices):
            record_transfer(kind, [tensor.values, tensor.indices], target, rows=rows, share=share)
        elif tensor is not None:
            transfers.add(kind, tensor, target, rows, share)


UPDATES = "updates"
_Key = tuple[str, str, str, str]


class LinkCounters:
    """Counts executions of traced steps, so that loops over steps and repeated steps are exact.

    A step adds one small vector to one variable, beside the work of the stages.
    """

    def __init__(self, chief: str) -> None:
        """Creates the counters on the device `chief`."""
        self._chief = chief
        self._counters: dict[tuple[_Key, ...], tf.Variable] = {}

    def add(
        self, step: str, sent: Mapping[tuple[str, str, str], "int | tf.Tensor"], updates: "int | tf.Tensor" = 0
    ) -> None:
        """Counts one step, such as "train_step", and whether it updates the weights. Call this while it is traced."""
        numbers = {(step, *key): number for key, number in sent.items()} | {(step, "", "", UPDATES): updates}
        keys = tuple(numbers)
        with tf.device(self._chief):
            if keys not in self._counters:
                with tf.init_scope():
                    zeros = tf.zeros([len(keys)], tf.int64)
                    self._counters[keys] = ResourceVariable(zeros, trainable=False, name="link_counters")
            values = list(numbers.values())
            if all(isinstance(value, int) for value in values):
                added = tf.constant(values, tf.int64)  # one operation
            else:
                added = tf.stack([tf.cast(value, tf.int64) for value in values])
            self._counters[keys].assign_add(added)

    def count(self, step: str | None = None) -> dict[tuple[str, str], dict[str, int]]:
        """Returns what all steps, or one kind of them, have sent by source and target, and by kind. Call this eagerly.

        Updates are under `("", "")`.
        """
        totals: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for keys, counter in self._counters.items():
            for (of_step, source, target, kind), number in zip(keys, counter.numpy().tolist(), strict=True):
                if step in (None, of_step):
                    totals[source, target][kind] += number
        return {link: dict(by_kind) for link, by_kind in totals.items()}


_SLICED_FROM = 1 << 14  # elements; the slices of a smaller gradient cost more than they save


def summed_over_columns(
    gradients: Sequence[Any], devices: Sequence[str], kinds: Sequence[str] = (WEIGHT_GRADIENT, DENSE)
) -> list[Any]:
    """Returns for each column the sum of all columns' gradients of a variable, dense or rows; None if none has one."""
    present = [(one, device) for one, device in zip(gradients, devices, strict=True) if one is not None]
    if not present:
        return [None] * len(devices)
    if len(devices) == 1:
        return list(gradients)
    if all(isinstance(gradient, tf.IndexedSlices) for gradient, _ in present):
        return _for_each(devices, [gradient for gradient, _ in present], _joined_rows, kinds)
    dense = []
    for gradient, device in present:
        with tf.device(device):
            dense.append(tf.convert_to_tensor(gradient))
    count, elements = len(devices), dense[0].shape.num_elements()
    if count == 2 or elements is None or elements < _SLICED_FROM:
        return _for_each(devices, dense, tf.add_n, kinds)
    sizes = [elements * (index + 1) // count - elements * index // count for index in range(count)]
    slices = []
    for tensor, (_, device) in zip(dense, present, strict=True):
        with tf.device(device):
            slices.append(tf.split(tf.reshape(tensor, [-1]), sizes))
    return _summed_slices(devices, slices, lambda sums: tf.reshape(tf.concat(sums, 0), dense[0].shape), kinds)


def summed_over_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], rows: Any, *, kind: str) -> list[Any]:
    """Returns for each device of a stage the sum of all tensors, which have equal shapes.

    With two devices, or an axis of features that is not divisible, each sends its tensor to all others. `rows` is the
    size of the first axis if it is not static.
    """
    ways, width = len(devices), tensors[0].shape[-1] if tensors[0].shape.rank else None
    if ways == 2 or width is None or width % ways:
        return _for_each(devices, tensors, tf.add_n, [kind], rows)
    slices = []
    for tensor, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            slices.append(tf.split(tensor, ways, -1))
    return _summed_slices(devices, slices, lambda sums: tf.concat(sums, -1), [kind], rows)


def gathered_from_shards(tensors: Sequence[tf.Tensor], devices: Sequence[str], rows: Any, *, kind: str) -> list[Any]:
    """Returns for each device the tensors of all, stacked along a new first axis. Arguments: `summed_over_shards`."""
    return _for_each(devices, tensors, tf.stack, [kind], rows)


def gathered_from_columns(tensors: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns for each column the tensors of all columns, one after another along axis 0."""
    return _for_each(devices, tensors, lambda sent: tf.concat(sent, 0), [WEIGHT_GRADIENT])


def exchanged_slices(slices: Sequence[tf.Tensor], devices: Sequence[str]) -> list[tf.Tensor]:
    """Sends slice `i` of each column, of shape `[columns, length]`, to column `i`, which stacks them in order."""
    sent = []
    for tensor, device in zip(slices, devices, strict=True):
        with tf.device(device):
            sent.append(tf.unstack(tensor, num=len(devices)))
    return _for_slices(devices, sent, tf.stack, [WEIGHT_GRADIENT])


def _summed_slices(
    devices: Sequence[str],
    slices: Sequence[Sequence[tf.Tensor]],
    joined: Callable[..., tf.Tensor],
    kinds: Sequence[str],
    rows: Any = None,
) -> list[tf.Tensor]:
    """Each device adds one slice of all tensors and sends the sum to the others: 2 (K - 1) / K of the size."""
    return _for_each(devices, _for_slices(devices, slices, tf.add_n, kinds, rows), joined, kinds, rows)


def _for_slices(
    devices: Sequence[str],
    slices: Sequence[Sequence[tf.Tensor]],
    combined: Callable[..., tf.Tensor],
    kinds: Sequence[str],
    rows: Any = None,
) -> list[tf.Tensor]:
    """Sends slice `i` of each device to device `i`, and returns what `combined` makes of them there."""
    results: list[tf.Tensor] = []
    for index, device in enumerate(devices):
        results += _for_each([device], [of_device[index] for of_device in slices], combined, kinds, rows)
    return results


def _for_each(
    devices: Sequence[str], sent: Sequence[Any], combined: Callable[..., Any], kinds: Sequence[str], rows: Any = None
) -> list[Any]:
    """Sends tensors to each device, and returns what `combined` makes of them there."""
    results = []
    for device in devices:
        for kind in kinds:
            record_transfer(kind, sent, device, rows=rows)
        with tf.device(device):
            results.append(combined(list(sent)))
    return results


def _joined_rows(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    values, indices = (tf.concat([getattr(sent, name) for sent in slices], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, indices, slices[0].dense_shape)
