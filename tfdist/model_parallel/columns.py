"""Columns of stages: copies of the model on other devices, and the sums of their gradients."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable, holding
from tfdist.model_parallel.placement import copied_variables, copy_to
from tfdist.model_parallel.stages import ModelStages
from tfdist.model_parallel.transfers import DENSE, WEIGHT_GRADIENT, record_transfer
from tfdist.tensorflow_internals.placed_strategy import ColumnVariable
from tfdist.tensorflow_internals.split_variables import part_size

_SLICED_FROM = 1 << 14  # elements; the slices of a smaller gradient cost more than they save


class Columns:
    """The columns of a placed model. The variables of the first one are those that the program sees.

    Attributes:
        devices: By column and stage.
        ways: How many neighbouring columns share one copy of the model; here 1.
        axes: By the id of a variable that such columns split, its axis.
        weight_of_slot: By the id of a slot that is not split yet, the id of its weight.
    """

    ways = 1
    axes: Mapping[int, int] = {}

    def __init__(self, devices: Sequence[Sequence[str]]) -> None:
        self.devices = devices
        self.weight_of_slot: Mapping[str, str] = {}
        self._variables: list[keras.Variable] = []

    def __len__(self) -> int:
        return len(self.devices)

    def copy(self, model: Any, stages: ModelStages) -> None:
        """Creates the missing copies of the model's placed variables."""
        self._variables = copied_variables(model, stages)
        for variable in self._variables:
            if not held_variable(variable).copies:
                for device in self.devices_of(variable)[1:]:
                    copy_to(variable, device)

    def holds(self, variable: keras.Variable) -> bool:
        """Whether each column has a copy or a part of a variable."""
        return any(variable is one for one in self._variables)

    def move_parts(self, model: Any, stages: ModelStages) -> None:
        """Moves variables that were created in parts, which other columns than these share, to their stages."""

    def devices_of(self, variable: keras.Variable) -> tuple[str, ...]:
        """Returns by column the device that holds a variable: mostly, but not always, that of its stage."""
        device = held_variable(variable).device
        stage = self.devices[0].index(device) if device in self.devices[0] else 0
        return tuple(of_stages[stage] for of_stages in self.devices)

    def shape_of_part(self, variable: keras.Variable) -> tuple[int, ...]:
        """Returns the shape of what a column has of a variable."""
        axis = self.axes.get(id(variable))
        return tuple(part_size(size, self.ways) if index == axis else size for index, size in enumerate(variable.shape))

    @contextmanager
    def entered(self, column: int) -> Iterator[None]:
        """In the body, variables are held by their copy in a column."""
        held = [(variable, held_variable(variable)) for variable in self._variables] if column else []
        with holding({id(variable): (variable, one.copies[column - 1]) for variable, one in held}):
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """In the body, each column assigns its copies itself."""
        ColumnVariable.follows = False
        try:
            yield
        finally:
            ColumnVariable.follows = True


def summed_over_columns(
    gradients: Sequence[Any], devices: Sequence[str], kinds: Sequence[str] = (WEIGHT_GRADIENT, DENSE)
) -> list[Any]:
    """Returns for each column the sum of all columns' gradients of a variable, bit-identical.

    Args:
        gradients: By column, dense or `tf.IndexedSlices`; None if a column has none.
        devices: By column, where the variable is.
        kinds: As what the transfers are recorded.
    """
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if not present:
        return [None] * len(devices)
    if len(devices) == 1:
        return list(gradients)
    given = [gradients[index] for index in present]
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in given):
        return _gathered_rows(given, devices, kinds)
    own = [devices[index] for index in present]
    dense = []
    for gradient, device in zip(given, own, strict=True):
        with tf.device(device):
            dense.append(tf.convert_to_tensor(gradient))
    elements = dense[0].shape.num_elements()
    if len(devices) == 2 or elements is None or elements < _SLICED_FROM:
        return _sums_of_all(dense, devices, kinds)
    return _sums_of_slices(dense, own, devices, kinds)


def _sums_of_all(tensors: Sequence[tf.Tensor], devices: Sequence[str], kinds: Sequence[str]) -> list[Any]:
    """Each column receives the gradients of all others, and adds them in the same order."""
    sums = []
    for device in devices:
        _record(tensors, device, kinds)
        with tf.device(device):
            sums.append(tf.add_n(list(tensors)))
    return sums


def _sums_of_slices(
    tensors: Sequence[tf.Tensor], own: Sequence[str], devices: Sequence[str], kinds: Sequence[str]
) -> list[Any]:
    """Each column adds one slice of all gradients and sends the sum to the others: 2 (K - 1) / K of the size."""
    count, shape, elements = len(devices), tensors[0].shape, int(tensors[0].shape.num_elements())
    sizes = [elements * (index + 1) // count - elements * index // count for index in range(count)]
    slices = []
    for tensor, device in zip(tensors, own, strict=True):
        with tf.device(device):
            slices.append(tf.split(tf.reshape(tensor, [-1]), sizes))
    partial = []
    for index, device in enumerate(devices):
        received = [of_column[index] for of_column in slices]
        _record(received, device, kinds)
        with tf.device(device):
            partial.append(tf.add_n(received))
    sums = []
    for device in devices:
        _record(partial, device, kinds)
        with tf.device(device):
            sums.append(tf.reshape(tf.concat(partial, 0), shape))
    return sums


def _gathered_rows(rows: Sequence[Any], devices: Sequence[str], kinds: Sequence[str]) -> list[Any]:
    """Each column receives the rows of all others."""
    gathered = []
    for device in devices:
        _record(rows, device, kinds)
        with tf.device(device):
            values, indices = (tf.concat([getattr(one, name) for one in rows], 0) for name in ("values", "indices"))
            gathered.append(tf.IndexedSlices(values, indices, rows[0].dense_shape))
    return gathered


def _record(tensors: Sequence[Any], device: str, kinds: Sequence[str]) -> None:
    for kind in kinds:
        record_transfer(kind, tensors, device)
