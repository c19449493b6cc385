"""A shard of a checkpoint: what one rank saves, stored as one safetensors file."""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tfdist.checkpoint.errors import CorruptCheckpointError

Json = dict[str, Any]
_Array = npt.NDArray[Any]
_NATIVE_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64".split()
)
_ESCAPE_PREFIX = "json:"
_RESERVED_NAME = "__metadata__"
# safetensors hides the error number in its message.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
# Upper bound of the header's size per tensor, without the name.
_HEADER_BYTES_PER_TENSOR = 512


@dataclass(frozen=True)
class Shard:
    """Named tensors with JSON metadata.

    Attributes:
        tensors: Arrays of any name and shape, including `()` and `(0, 3)`, of NumPy's numeric dtypes, bool, or a dtype
            of `ml_dtypes` (bfloat16, float8).
        metadata: A dictionary that JSON can represent. It is read as JSON has it: a tuple as a list, keys as strings.
    """

    tensors: Mapping[str, _Array]
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True)
class EncodedShard:
    """A shard in terms of safetensors.

    Attributes:
        tensors: Arrays under the names of the file, with dtypes of the format. They share the shard's memory.
        header: The metadata and the names of other dtypes, as JSON.
    """

    tensors: Mapping[str, _Array]
    header: Mapping[str, str]

    @property
    def max_bytes(self) -> int:
        """Upper bound of the size of the file."""
        tensors = sum(tensor.nbytes for tensor in self.tensors.values())
        header = sum(map(len, self.tensors)) + sum(map(len, self.header.values()))
        return tensors + 2 * header + _HEADER_BYTES_PER_TENSOR * (len(self.tensors) + 8)


def encode_shard(shard: Shard) -> EncodedShard:
    """Checks that a shard can be written and prepares it for `write_shard`.

    Raises:
        ValueError: If the dtype of a tensor is not numeric, or the metadata is not JSON.
    """
    metadata = dump_metadata(shard.metadata)
    tensors, dtypes = {}, {}
    for name, tensor in shard.tensors.items():
        _check_tensor(name, tensor)
        array = np.asarray(tensor, order="C")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype.name not in _NATIVE_DTYPES:
            dtypes[name] = array.dtype.name
            array = array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
        tensors[_to_stored_name(name)] = array
    return EncodedShard(tensors, {"metadata": metadata, "dtypes": json.dumps(dtypes)})


def write_shard(path: Path, encoded: EncodedShard) -> None:
    """Writes a shard to a new file. The data may still be in the page cache afterwards.

    Raises:
        OSError: If the file cannot be written, with the error number of the system.
        FileExistsError: If the file exists.
        ValueError: If names and metadata are too large.
    """
    # safetensors creates files that only their owner may read; this one gets the permissions of any new file.
    with open(path, "xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(dict(encoded.tensors), path, dict(encoded.header))
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise ValueError(
                f"A part of a checkpoint cannot be written. Received: {error}. Expected: names and metadata of less "
                "than 100 MB in total, the limit of safetensors. Store large metadata as tensors."
            ) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    os.chmod(path, mode)


def read_shard(path: Path) -> Shard:
    """Reads a shard into memory. The arrays are writable.

    Raises:
        CorruptCheckpointError: If `write_shard` did not write this file.
    """
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata()
            stored = {_from_stored_name(name): file.get_tensor(name) for name in file.keys()}
        dtypes = json.loads(header["dtypes"])
        tensors = {name: _with_dtype(array, dtypes.get(name)) for name, array in stored.items()}
        return Shard(tensors, json.loads(header["metadata"]))
    except PermissionError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error}") from error


def dump_metadata(metadata: Json) -> str:
    """Returns `metadata` as JSON in ASCII. NaN and infinities are kept, in Python's spelling.

    Raises:
        ValueError: If JSON cannot represent it.

    >>> dump_metadata({"loss": [0.5, None]})
    '{"loss": [0.5, null]}'
    """
    try:
        text = json.dumps(metadata)
        if json.dumps(json.loads(text)) == text and isinstance(metadata, dict):
            return text
        problem = "two keys that are equal in JSON" if isinstance(metadata, dict) else f"a {type(metadata).__name__}"
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(
        f"The metadata of a checkpoint cannot be written as JSON. Received: {problem}. Expected: a dictionary "
        "of numbers, strings, booleans, None, lists and dictionaries with strings as keys. Store arrays as tensors, "
        "and convert NumPy's scalars with .item()."
    )


def _check_tensor(name: Any, tensor: Any) -> None:
    dtype = np.asarray(tensor).dtype
    try:
        is_known = dtype.newbyteorder("=") == _dtype_named(dtype.name)
    except (TypeError, AttributeError):
        is_known = False
    if not is_known or not isinstance(name, str):
        raise ValueError(
            f"A tensor of a checkpoint cannot be written. Received: {name!r} of dtype {dtype}. Expected: a string as "
            "name, and a numeric dtype of NumPy, bool, or a dtype of ml_dtypes. Store strings and objects in the "
            "metadata, as JSON."
        )


def _with_dtype(array: _Array, dtype: str | None) -> _Array:
    return array if dtype is None else array.reshape(-1).view(_dtype_named(dtype)).reshape(array.shape[:-1])


def _dtype_named(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    # Rejects datetimes, strings, objects and records. The dtypes of ml_dtypes are of kind V, too, but built in.
    if dtype.kind not in "biufcV" or (dtype.kind == "V" and dtype.isbuiltin != 2):
        raise TypeError(f"{name} is not a numeric dtype")
    return dtype


def _to_stored_name(name: str) -> str:
    """Returns the name of a tensor in the file; names that are reserved or that UTF-8 cannot encode are escaped."""
    encodable = name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)
    is_plain = encodable and name != _RESERVED_NAME and not name.startswith(_ESCAPE_PREFIX)
    return name if is_plain else _ESCAPE_PREFIX + json.dumps(name)


def _from_stored_name(stored: str) -> str:
    return str(json.loads(stored.removeprefix(_ESCAPE_PREFIX))) if stored.startswith(_ESCAPE_PREFIX) else stored
