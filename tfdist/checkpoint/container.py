"""A shard as one safetensors file.

Dtypes that safetensors does not have in NumPy (bfloat16, float8, complex128, long double) are stored as bytes,
with one dimension more; the metadata of the file names them. It also holds the notes, as JSON.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tfdist.checkpoint.errors import BrokenError
from tfdist.checkpoint.shard import Shard, to_json

_Array = npt.NDArray[Any]
_NATIVE = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64".split())
_ESCAPED = "json:"
_RESERVED = "__metadata__"
# The library hides the error number in its message.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
# More than what the header says of a tensor beside its name.
_HEADER_BYTES_PER_TENSOR = 512


@dataclass(frozen=True)
class Encoded:
    """A shard as safetensors takes it.

    Attributes:
      tensors: by the names that they have in the file, of dtypes that it has; they share the shard's memory.
      metadata: the notes and the other dtypes, as JSON.
    """

    tensors: Mapping[str, _Array]
    metadata: Mapping[str, str]

    @property
    def most_bytes(self) -> int:
        """How large the file may become."""
        tensors = sum(tensor.nbytes for tensor in self.tensors.values())
        header = sum(map(len, self.tensors)) + sum(map(len, self.metadata.values()))
        return tensors + 2 * header + _HEADER_BYTES_PER_TENSOR * (len(self.tensors) + 8)


def encode(shard: Shard) -> Encoded:
    """Looks whether a shard can be written, and prepares it.

    Raises:
      ValueError: if a tensor has a dtype that is no number, or the notes are not JSON.
    """
    notes = to_json(shard.notes, "the notes")
    tensors, dtypes = {}, {}
    for name, tensor in shard.tensors.items():
        _check(name, tensor)
        array = np.asarray(tensor, order="C")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if array.dtype.name not in _NATIVE:
            dtypes[name] = array.dtype.name
            array = array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
        tensors[_to_stored_name(name)] = array
    return Encoded(tensors, {"notes": notes, "dtypes": json.dumps(dtypes)})


def _check(name: Any, tensor: Any) -> None:
    dtype = np.asarray(tensor).dtype
    try:
        known = dtype.newbyteorder("=") == _dtype_named(dtype.name)
    except (TypeError, AttributeError):
        known = False
    if not known or not isinstance(name, str):
        raise ValueError(
            f"A tensor of a checkpoint cannot be written. Received: {name!r} of dtype {dtype}. Expected: a string as "
            "name, and a dtype of NumPy's numbers, bool, or one of ml_dtypes. Put strings and objects into the notes, "
            "as JSON."
        )


def write(path: Path, encoded: Encoded) -> None:
    """Writes what `encode` returned to a new file; it may still be in the cache of the disk.

    Raises:
      OSError: if it cannot be written, with the error number of the system.
      FileExistsError: if the file is there.
      ValueError: if the names and notes are too large.
    """
    # The library gives the file to its owner alone; it is to have the permissions of any new file here.
    with open(path, "xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(dict(encoded.tensors), path, dict(encoded.metadata))
    except SafetensorError as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise ValueError(
                f"A part of a checkpoint cannot be written. Received: {error}. Expected: what safetensors holds, so "
                "names and notes of less than 100 MB together. Put large notes into tensors."
            ) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    os.chmod(path, mode)


def read(path: Path) -> Shard:
    """Reads a shard; the arrays are in memory and may be written to.

    Raises:
      BrokenError: if the file is not one that `write` made.
    """
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
            stored = {_from_stored_name(name): file.get_tensor(name) for name in file.keys()}
        dtypes = json.loads(metadata["dtypes"])
        tensors = {name: _typed(array, dtypes.get(name)) for name, array in stored.items()}
        return Shard(tensors, json.loads(metadata["notes"]))
    except PermissionError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise BrokenError(f"{path.name} cannot be read: {error}") from error


def _typed(array: _Array, dtype: str | None) -> _Array:
    return array if dtype is None else array.reshape(-1).view(_dtype_named(dtype)).reshape(array.shape[:-1])


def _dtype_named(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, name))
    # Not datetimes, strings, objects or records: those of ml_dtypes are of kind V, but no records.
    if dtype.kind not in "biufcV" or (dtype.kind == "V" and dtype.isbuiltin != 2):
        raise TypeError(f"{name} is no number")
    return dtype


def _to_stored_name(name: str) -> str:
    """Names as they are, except those that the format reserves or that UTF-8 does not have."""
    encodable = name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)
    return name if encodable and name != _RESERVED and not name.startswith(_ESCAPED) else _ESCAPED + json.dumps(name)


def _from_stored_name(stored: str) -> str:
    return str(json.loads(stored.removeprefix(_ESCAPED))) if stored.startswith(_ESCAPED) else stored
