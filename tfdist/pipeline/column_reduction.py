"""Sums the gradients of columns: compressed as the policy says, with a state for each variable and column."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.collectives import CompressionState
from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES, fill_buckets
from tfdist.collectives.compressed_all_reduce import ENCODED_DTYPES
from tfdist.collectives.sparse_all_reduce import sum_encoded_slices
from tfdist.compression import Compressor, Dense, Group, Policy, WarmUp
from tfdist.compression.gradient_tensors import all_finite, values_of
from tfdist.pipeline.device_program import DeviceProgram, ExchangeRecord
from tfdist.pipeline.transfers import (
    DENSE,
    WEIGHT_GRADIENT,
    exchanged_slices,
    gathered_from_columns,
    record_transfer,
    summed_over_columns,
    unrecorded,
)

_Write = tuple[Any, tf.Tensor, tf.Tensor | None]  # a variable, and the new value of it or of these rows


def _write(writes: Sequence[_Write], finite: tf.Tensor) -> None:
    """Assigns the values if the bool scalar `finite` is true. Only this scalar is sent to the devices."""
    by_device: dict[str, list[_Write]] = defaultdict(list)
    for write in writes:
        by_device[write[0].device].append(write)
    for device, of_device in by_device.items():
        variables, values, rows = (list(column) for column in zip(*of_device, strict=True))
        with tf.device(device):
            _function(variables)(tf.identity(finite), values, rows)


def _function(variables: list[tf.Variable]) -> Callable[..., None]:
    def store(finite: tf.Tensor, values: list[tf.Tensor], rows: list[Any]) -> None:
        def assign() -> None:
            for variable, value, indices in zip(variables, values, rows, strict=True):
                if indices is None:
                    variable.assign(value)
                else:
                    variable.scatter_update(tf.IndexedSlices(value, indices))

        tf.cond(finite, assign, lambda: None)

    return tf.function(store, autograph=False, experimental_attributes={"_noinline": True})


_STEPS = "warm_up_steps"  # the entry in which `WarmUp` counts


@dataclass(frozen=True)
class ColumnGradient:
    """The gradients of one variable.

    Attributes:
        path: The unique path of the variable.
        shape: The shape of what each column has of it.
        is_split: Whether each column has a part of it.
        replicas: The numbers of the columns, under which compressors keep their state.
        devices: By column, where the variable is.
        of_columns: By column, dense or `tf.IndexedSlices` on that device; None if the column has none.
    """

    path: str
    shape: tuple[int, ...]
    is_split: bool
    replicas: tuple[int, ...]
    devices: tuple[str, ...]
    of_columns: Sequence[Any]


Sums = list[list[Any]]  # by column and variable


class ColumnReduction:
    """Sums gradients over the columns of a strategy, bit-identically."""

    def __init__(self, policy: Policy, state: CompressionState) -> None:
        """Reduces by `policy`; its compressors keep their state in `state`, where columns are replicas."""
        self._policy, self._state = policy, state

    def __call__(self, gradients: Sequence[ColumnGradient], update: Callable[[Sums], None]) -> None:
        """Calls `update` with the sums of `gradients` by column and variable.

        While a `WarmUp` sends gradients uncompressed, another branch of the graph does both. It contains the update,
        because results of a branch would pass through one device.
        """
        counted = [gradient for gradient in gradients if self._warm_up_of(gradient) is not None]
        steps = {self._warm_up_of(gradient).steps for gradient in counted}
        if len(steps) > 1:
            raise ValueError(
                "The columns of a model-parallel strategy send all variables uncompressed in the same steps. Received: "
                f"WarmUp for {sorted(steps)} steps. Expected: one number of steps."
            )
        if not counted:
            return update(self._sums(gradients, is_warm_up=False))
        count = self._states(counted[0])[0][_STEPS]
        tf.cond(
            tf.less(count, steps.pop()),
            unrecorded(lambda: update(self._sums(gradients, is_warm_up=True))),  # its steps count as compressed
            lambda: update(self._sums(gradients, is_warm_up=False)),
        )

    def _sums(self, gradients: Sequence[ColumnGradient], *, is_warm_up: bool) -> Sums:
        results: list[list[Any]] = [[]] * len(gradients)  # by variable
        finite: list[tf.Tensor] = []
        exact: list[Any] = []  # sums of the first column that were not compressed
        writes: list[_Write] = []
        together: dict[Any, list[int]] = defaultdict(list)
        for position, gradient in enumerate(gradients):
            compressor, has_state = self._resolve(gradient)
            if compressor != Dense() and not isinstance(gradient.of_columns[0], tf.IndexedSlices):
                # What a bucket sends may depend on all of it, but copies of whole variables must stay equal.
                together[compressor, gradient.devices, gradient.is_split].append(position)
            elif compressor != Dense() and has_state and compressor.encodes_rows:
                results[position], flag = self._sum_rows(gradient, compressor, writes, is_warm_up)
                finite.append(flag)
            else:
                results[position] = summed_over_columns(gradient.of_columns, gradient.devices)
                exact.append(results[position][0])
        for (compressor, *_), positions in together.items():
            for bucket in fill_buckets([gradients[index].of_columns[0] for index in positions], DEFAULT_BUCKET_BYTES):
                chosen = [positions[index] for index in bucket]
                sums, flag = self._sum_bucket([gradients[index] for index in chosen], compressor, writes, is_warm_up)
                finite.append(flag)
                for position, of_columns in zip(chosen, zip(*sums, strict=True), strict=True):
                    results[position] = list(of_columns)
        if writes:
            _write(writes, tf.reduce_all(tf.stack([*finite, *_finite_on_devices(exact)])))
        return [list(of_column) for of_column in zip(*results, strict=True)]

    def _resolve(self, gradient: ColumnGradient) -> tuple[Compressor, bool]:
        """Returns the compressor of a variable, and whether it needs its state."""
        for of_column in gradient.of_columns:
            if of_column is None or values_of(of_column).dtype not in ENCODED_DTYPES or len(gradient.devices) == 1:
                return Dense(), False
        return self._policy.resolve(gradient.path, gradient.shape)

    def _warm_up_of(self, gradient: ColumnGradient) -> Any:
        compressor, has_state = self._resolve(gradient)
        return compressor if has_state and isinstance(compressor, WarmUp) else None

    def _states(self, gradient: ColumnGradient) -> list[dict[str, tf.Variable]]:
        """Returns by column the variables with the state of the variable's compressor."""
        compressor, _ = self._resolve(gradient)
        return [
            self._state.replica_state(column, device).of(gradient.path, compressor, gradient.shape, device)
            for column, device in zip(gradient.replicas, gradient.devices, strict=True)
        ]

    def _sum_bucket(
        self, gradients: Sequence[ColumnGradient], compressor: Compressor, writes: list[_Write], is_warm_up: bool
    ) -> tuple[Sums, tf.Tensor]:
        """Sums dense gradients of one compressor on the same devices."""
        has_state = [self._resolve(gradient)[1] for gradient in gradients]
        method = _in_phase(compressor, is_warm_up)
        devices = gradients[0].devices
        variables: list[list[dict[str, tf.Variable]]] = [
            self._states(gradient) if has else [{} for _ in devices]
            for gradient, has in zip(gradients, has_state, strict=True)
        ]

        def reduce(group: Group, tensors: list[tf.Tensor], states: list[dict[str, tf.Tensor]]) -> Any:
            of_method = [_inner(state) if has else None for state, has in zip(states, has_state, strict=True)]
            reduced = method.reduce([tf.cast(tensor, tf.float32) for tensor in tensors], group, of_method)
            sums = [tf.cast(summed, tensor.dtype) for summed, tensor in zip(reduced.sums, tensors, strict=True)]
            return sums, [_counted(*pair) for pair in zip(states, reduced.states, strict=True)], reduced.finite

        tensors = [[gradient.of_columns[column] for gradient in gradients] for column in range(len(devices))]
        for of_column in tensors:
            for tensor, gradient in zip(of_column, gradients, strict=True):
                tensor.set_shape(gradient.shape)
        states = [_read([of_columns[c] for of_columns in variables], device) for c, device in enumerate(devices)]
        results = _on_columns(reduce, [list(pair) for pair in zip(tensors, states, strict=True)], devices)
        _record_uncompressed([gradient.of_columns for gradient in gradients], devices)
        for column, (_, new_states, _) in enumerate(results):
            for of_columns, new_state in zip(variables, new_states, strict=True):
                for name, value in new_state.items():
                    writes.append((of_columns[column][name], value, None))
        return [sums for sums, _, _ in results], results[0][2]

    def _sum_rows(
        self, gradient: ColumnGradient, compressor: Compressor, writes: list[_Write], is_warm_up: bool
    ) -> tuple[list[Any], tf.Tensor]:
        """Sums sparse gradients of one variable."""
        method = _in_phase(compressor, is_warm_up)
        variables = self._states(gradient)
        slices = list(gradient.of_columns)

        def reduce(group: Group, tensors: list[tf.Tensor], state: dict[str, tf.Tensor]) -> Any:
            values, indices = tensors
            rows = tf.IndexedSlices(tf.cast(values, tf.float32), indices, tf.constant(gradient.shape))
            summed, new_state, changed, finite = sum_encoded_slices(rows, method, group, _inner(state))
            return [tf.cast(summed.values, values.dtype), summed.indices, changed], _counted(state, new_state), finite

        _record_uncompressed([slices], gradient.devices)
        tensors = [[of_column.values, of_column.indices] for of_column in slices]
        states = [_read([entries], device)[0] for entries, device in zip(variables, gradient.devices, strict=True)]
        results = _on_columns(reduce, [list(pair) for pair in zip(tensors, states, strict=True)], gradient.devices)
        sums = []
        for entries, of_column, ((values, indices, rows), new_state, _) in zip(variables, slices, results, strict=True):
            sums.append(tf.IndexedSlices(values, indices, of_column.dense_shape))
            for name, value in new_state.items():
                writes.append((entries[name], value, rows if value.shape.rank else None))
        return sums, results[0][2]


def _record_uncompressed(gradients: Sequence[Sequence[Any]], devices: Sequence[str]) -> None:
    """Records what the columns would send without compression: 2 (K - 1) / K of each gradient, or all rows."""
    for of_columns in gradients:
        for device in devices:
            record_transfer(DENSE, of_columns, device, share=2 / len(devices))


def _in_phase(compressor: Compressor, is_warm_up: bool) -> Compressor:
    if not isinstance(compressor, WarmUp):
        return compressor
    return (compressor.uncompressed() if is_warm_up else compressor).compressor


def _inner(state: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {name: value for name, value in state.items() if name != _STEPS}


def _counted(state: dict[str, tf.Tensor], new_state: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns a new state, with the next count of the steps if they are counted."""
    return {**new_state, _STEPS: state[_STEPS] + 1} if _STEPS in state else dict(new_state)


def _read(variables: Sequence[dict[str, tf.Variable]], device: str) -> list[dict[str, tf.Tensor]]:
    with tf.device(device):
        return [{name: variable.read_value() for name, variable in entries.items()} for entries in variables]


def _on_columns(reduce: Callable[..., Any], arguments: Sequence[list[Any]], devices: Sequence[str]) -> list[Any]:
    """Returns by column what a function of a group and arguments returns, for the arguments of each column."""
    specs = tf.nest.map_structure(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), arguments[0])

    def without_gradients(group: Group, *of_column: Any) -> tuple[Any, Any]:
        return reduce(group, *of_column), []

    return DeviceProgram(without_gradients, specs, len(devices), ColumnGroup).forward(arguments, devices)[0]


class ColumnGroup(ExchangeRecord, Group):
    """Records the exchanges of a reduction that is being traced."""

    size = 0

    def __init__(self, size: int, graph: Any) -> None:
        """Records those of `size` columns in `graph`."""
        super().__init__(graph)
        self.size = size

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `Group`."""
        send = functools.partial(summed_over_columns, kinds=[WEIGHT_GRADIENT])
        return self._record("sum", tensor, tensor.shape, send)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """See `Group`."""
        length = tensor.shape[0]
        of_all = [length and length * self.size, *tensor.shape[1:]]
        return self._record("gather", tensor, of_all, gathered_from_columns)

    def exchange(self, slices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Group`."""
        return self._record("exchange", slices, slices.shape, exchanged_slices), self.own_rank()

    def _record(self, kind: str, tensor: tf.Tensor, of_received: Any, send: Callable[..., list[tf.Tensor]]) -> Any:
        return self.add(
            tensor,
            tensor.shape,
            of_received,
            lambda sent, devices, rows: send(sent, devices),
            "Columns cannot exchange gradients within a condition or a loop. Received: a compressor whose `reduce` "
            f"calls `group.{kind}` there. Expected: exchanges outside of `tf.cond` and `tf.while_loop`.",
        )


def _finite_on_devices(sums: Sequence[Any]) -> list[tf.Tensor]:
    """Returns for each sum that there is whether it is finite."""
    flags = []
    for values in [values_of(summed) for summed in sums if summed is not None]:
        with tf.device(values.device):
            flags.append(all_finite([values]))
    return flags
