"""Which columns become which tensors of a batch: features, label and sample weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfdist.data.block_source import BlockSource
from tfdist.data.tensor_columns import ColumnFormat, column_format, infer_shape, to_array

_STRING_BYTES = 1 << 14  # between a word and an image

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class TensorFormat:
    """A tensor of a batch: one column, or several numeric columns side by side."""

    columns: tuple[ColumnFormat, ...]  # the columns, in order
    dtype: Any  # NumPy's dtype; `object` for `tf.string`
    shape: tuple[int, ...]  # the shape of a row

    @property
    def row_bytes(self) -> int:
        """About how many bytes a row has in memory."""
        value = _STRING_BYTES if self.dtype == object else self.dtype.itemsize
        return int(np.prod(self.shape, dtype=np.int64)) * value

    def array(self, table: Any, place: str, first_row: int) -> np.ndarray:
        """Returns the tensor's values of some rows of a block."""
        parts = [to_array(table.column(column.column), column, place, first_row) for column in self.columns]
        if len(parts) == 1 and self.shape == self.columns[0].shape:
            return parts[0]
        flat = [part.reshape(len(part), column.width) for part, column in zip(parts, self.columns, strict=True)]
        return np.concatenate(flat, axis=1, dtype=self.dtype)


@dataclass(frozen=True)
class BatchLayout:
    """The tensors of a batch."""

    tensors: tuple[TensorFormat, ...]  # all tensors: those of features, label and weight, in this order
    features: tuple[str, ...] | None  # the names of the features' tensors; None for a single tensor without a name
    label: tuple[str, ...] | None  # likewise; an empty tuple without a label
    weight: bool  # whether there are sample weights, the last tensor

    @property
    def row_bytes(self) -> int:
        """About how many bytes a row has in memory; those of strings are not known."""
        return sum(tensor.row_bytes for tensor in self.tensors)

    def structure(self, values: Sequence[Any]) -> Any:
        """Returns what `fit` draws, `x`, `(x, y)` or `(x, y, sample_weight)`, of one value for each tensor."""
        remaining = list(values)
        x = _named(self.features, remaining)
        if self.label == ():
            return x
        y = _named(self.label, remaining)
        return (x, y, remaining[0]) if self.weight else (x, y)


def layout_of(
    source: BlockSource,
    features: Columns | None,
    label: Columns | None,
    weight: str | None,
    dtypes: Mapping[str, Any] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    fill: Mapping[str, Any] | None,
) -> BatchLayout:
    """Returns the layout of batches; the arguments are those of `PartitionedData.dataset`."""
    schema = source.schema
    if weight is not None and label is None:
        raise ValueError(
            f"Sample weights belong to labels. Received: weight={weight!r}, without a label. Expected: `label`, too."
        )
    if features is None:
        left_out = {*_all_columns(label), *([] if weight is None else [weight])}
        features = {name: name for name in schema.names if name not in left_out}
    groups = [("features", *_groups("features", features))]
    groups += [] if label is None else [("label", *_groups("label", label))]
    groups += [] if weight is None else [("weight", None, [(weight,)])]
    used = list(dict.fromkeys(column for _, _, columns in groups for group in columns for column in group))
    for argument, _, columns in groups:
        _check_columns(schema, [column for group in columns for column in group], argument)
    dtypes, shapes, fill = (
        _checked_keys(name, values, used) for name, values in (("dtypes", dtypes), ("shapes", shapes), ("fill", fill))
    )
    formats = {
        name: column_format(
            name, schema.field(name).type, dtype=dtypes.get(name), shape=shapes.get(name), fill=fill.get(name)
        )
        for name in used
    }
    formats |= _with_shapes(
        source, {name: list_format for name, list_format in formats.items() if list_format.shape is None}
    )
    tensors = [_tensor([formats[name] for name in group]) for _, _, columns in groups for group in columns]
    labels = () if label is None else groups[1][1]
    return BatchLayout(tuple(tensors), groups[0][1], labels, weight is not None)


def _named(names: tuple[str, ...] | None, remaining: list[Any]) -> Any:
    if names is None:
        return remaining.pop(0)
    return {name: remaining.pop(0) for name in names}


def _all_columns(columns: Columns | None) -> list[str]:
    return [] if columns is None else [name for group in _groups("label", columns)[1] for name in group]


def _groups(argument: str, columns: Columns) -> tuple[tuple[str, ...] | None, list[tuple[str, ...]]]:
    """Returns the names of the tensors, None for one without a name, and the columns of each."""
    if isinstance(columns, Mapping) and columns:
        return tuple(columns), [_groups(argument, group)[1][0] for group in columns.values()]
    names = [columns] if isinstance(columns, str) else columns
    if isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names):
        return None, [tuple(names)]
    raise ValueError(
        f"Invalid `{argument}`. Received: {argument}={columns!r}. Expected: the name of a column, a list of names, "
        "whose columns become one vector, or a dictionary of these by the name of the model's input."
    )


def _with_shapes(source: BlockSource, formats: Mapping[str, ColumnFormat]) -> dict[str, ColumnFormat]:
    """Returns formats of lists with the shapes of the first row."""
    if not formats:
        return {}
    if not source.rows_of_blocks:
        raise ValueError(
            f"The lists of {sorted(formats)} have no known length, as there are no rows. Received: no rows. Expected: "
            "`shapes` with the shape of each of these columns, or data."
        )
    table = source.read(0, list(formats))
    place = source.name_of(0)
    return {
        name: replace(list_format, shape=infer_shape(name, table.column(name), place))
        for name, list_format in formats.items()
    }


def _tensor(columns: Sequence[ColumnFormat]) -> TensorFormat:
    if len(columns) == 1:
        return TensorFormat(tuple(columns), columns[0].dtype, columns[0].shape or ())
    strings = [column.column for column in columns if column.dtype == object]
    if strings:
        raise ValueError(
            f"Strings cannot be values of a vector. Received: {strings} in a list of columns. Expected: numeric "
            "columns. Give strings as separate tensors, as `features={'numbers': ['a', 'b'], 'text': 'c'}`."
        )
    dtype = np.result_type(*(column.dtype for column in columns))
    return TensorFormat(tuple(columns), dtype, (sum(column.width for column in columns),))


def _check_columns(schema: Any, names: Sequence[str], argument: str) -> None:
    for name in names:
        if schema.names.count(name) != 1:
            raise ValueError(
                f"There is no column {name!r}, or there are several of that name. Received: {argument} with {name!r}. "
                f"Expected: some of {schema.names}."
            )


def _checked_keys(argument: str, values: Mapping[str, Any] | None, used: Sequence[str]) -> Mapping[str, Any]:
    """Returns a dictionary whose keys are columns that the dataset uses."""
    unknown = sorted(set(values or {}) - set(used))
    if unknown:
        raise ValueError(
            f"`{argument}` names columns that this dataset does not use. Received: {unknown}. Expected: some of "
            f"{sorted(used)}."
        )
    return values or {}
